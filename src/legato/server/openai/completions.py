"""POST /v1/completions: what it takes, and how it answers."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import cache
from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from msgspec import UNSET, UnsetType
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from legato.core.errors import InvalidRequestError
from legato.core.outputs import FinishReason, TokenLogprobs
from legato.core.sampling_params import MAX_N, SamplingParams
from legato.engine.frontend.completion import Completion, CompletionDelta
from legato.model.tokenizer import Tokenizer
from legato.server.context import ArrivalDep, Context, ContextDep
from legato.server.generation.answer import Usage, UsageField, respond
from legato.server.generation.job import Job, PromptDelta, run_job
from legato.server.generation.prompts import Prompt, check_text_fits, prompt_token_ids
from legato.server.generation.request import GenerationRequest, NumLogprobs
from legato.server.http.bodies import JsonRoute
from legato.server.openai.logprobs import (
    CompletionLogprobs,
    CompletionLogprobsWriter,
    PromptLogprobs,
    prompt_logprobs,
)
from legato.server.openapi import responses

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


def _as_prompts(value: Any) -> list[Prompt]:
    """Any of the four forms of a prompt as a list of prompts."""
    if isinstance(value, str) or _is_token_ids(value):
        return [value]
    if isinstance(value, list) and all(isinstance(v, str) or _is_token_ids(v) for v in value):
        if not value:
            raise ValueError("there is no prompt in it")
        return value
    raise ValueError("must be a text, a list of texts, a list of token ids or a list of such lists")


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(v) is int for v in value)


_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPTS = {
    "type": "array",
    "items": {"anyOf": [{"type": "string"}, _TOKEN_IDS]},
    "minItems": 1,
}
_PROMPT = {"anyOf": [{"type": "string"}, _PROMPTS, _TOKEN_IDS]}


class CompletionRequest(GenerationRequest):
    """Attributes: `prompt` is a list of prompts, whichever way it was sent."""

    prompt: Annotated[list[Prompt], BeforeValidator(_as_prompts), WithJsonSchema(_PROMPT)]
    add_special_tokens: bool = True
    echo: bool = False
    logprobs: NumLogprobs | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequestError("best_of must equal n", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError(
                "max_tokens must be at least 1, or 0 with echo: true", param="max_tokens"
            )
        if self.stream and self.echo and self.logprobs is not None:
            raise InvalidRequestError(
                "echo with logprobs is not available with stream: true", param="echo"
            )
        return self

    @property
    def is_echo_only(self) -> bool:
        """Whether the prompt alone is wanted back, scored perhaps."""
        return self.max_tokens == 0


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: `stop_reason` and `prompt_logprobs` are vLLM's."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, or a chunk of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageField = UNSET


class CompletionFormat:
    """Words the answers to one request.

    Args:
        prompt_text: gives what `echo` puts before the completions of a prompt; called with its
            index once it has an output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: CompletionRequest,
        job: Job,
        prompt_text: Callable[[int], str],
        *,
        answer_id: str,
        created: int,
        model: str,
    ) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._job = job
        self._prompt_text = prompt_text
        self._id = answer_id
        self._created = created
        self._model = model
        self._writers: dict[int, CompletionLogprobsWriter] = {}  # key choice, of those begun

    def answer(self, completions: list[Completion], usage: Usage) -> CompletionAnswer:
        num_per_prompt = self._job.params.n
        choices = [
            # Every completion of a prompt shows the scores that came with its first.
            self._choice(completion, completions[i - i % num_per_prompt].prompt_logprobs or [])
            for i, completion in enumerate(completions)
        ]
        return self._answer(choices, usage)

    def chunk(self, choice: int, delta: CompletionDelta, usage: UsageField) -> CompletionAnswer:
        is_first = choice not in self._writers
        prefix = self._echoed_text(choice) if is_first else ""
        piece = CompletionChoice(
            index=choice,
            text=prefix + delta.text,
            logprobs=self._logprobs(choice, delta.logprobs),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        return self._answer([piece], usage)

    def usage_chunk(self, usage: Usage) -> CompletionAnswer:
        return self._answer([], usage)

    def _choice(self, completion: Completion, scored: Sequence[TokenLogprobs]) -> CompletionChoice:
        wants_scores = self._request.prompt_logprobs is not None
        return CompletionChoice(
            index=completion.index,
            text=self._echoed_text(completion.index) + completion.text,
            logprobs=self._whole_logprobs(completion, scored),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            prompt_logprobs=prompt_logprobs(self._tokenizer, scored) if wants_scores else UNSET,
        )

    def _whole_logprobs(
        self, completion: Completion, scored: Sequence[TokenLogprobs]
    ) -> CompletionLogprobs | None:
        if not self._request.echo or completion.logprobs is None:
            return self._logprobs(completion.index, completion.logprobs)
        prompt = self._job.prompts[completion.index // self._job.params.n]
        writer = self._writer(completion.index)
        return writer.write_prompt(prompt, scored) + writer.write(completion.logprobs)

    def _logprobs(
        self, choice: int, entries: Sequence[TokenLogprobs] | None
    ) -> CompletionLogprobs | None:
        writer = self._writer(choice)
        return None if entries is None else writer.write(entries)

    def _writer(self, choice: int) -> CompletionLogprobsWriter:
        if choice not in self._writers:
            self._writers[choice] = CompletionLogprobsWriter(
                self._tokenizer,
                num_top=self._request.logprobs or 0,
                skip_special_tokens=self._job.params.skip_special_tokens,
            )
        return self._writers[choice]

    def _echoed_text(self, choice: int) -> str:
        if not self._request.echo:
            return ""
        return self._prompt_text(choice // self._job.params.n)

    def _answer(self, choices: list[CompletionChoice], usage: UsageField) -> CompletionAnswer:
        return CompletionAnswer(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )


@router.post(
    "/v1/completions",
    responses=responses(
        CompletionAnswer,
        errors=(HTTPStatus.NOT_FOUND, HTTPStatus.INTERNAL_SERVER_ERROR),
        streams=True,
    ),
)
async def create_completion(
    body: CompletionRequest, context: ContextDep, arrival: ArrivalDep
) -> Response:
    """Complete one prompt or several."""
    context.check_model(body.model)
    context.check_completions(body.n, len(body.prompt))
    for prompt in body.prompt:
        check_text_fits(context, len(prompt))
    job = Job(
        arrival=arrival,
        operation="text_completion",
        is_streamed=body.stream,
        prompts=await prompt_token_ids(
            context, body.prompt, add_special_tokens=body.add_special_tokens
        ),
        params=_sampling_params(context, body),
        service=body.service_params(),
    )
    answer_format = CompletionFormat(
        context.client.tokenizer,
        body,
        job,
        # Not before the prompt is known to have no token that does not exist.
        cache(lambda index: _text(context, body.prompt[index], body)),
        answer_id=f"cmpl-{arrival.request_id}",
        created=int(time.time()),
        model=context.model_name,
    )
    deltas = run_job(context, job)
    if body.is_echo_only:
        deltas = _without_output(deltas)
    return await respond(job, deltas, answer_format, body)


def _sampling_params(context: Context, body: CompletionRequest) -> SamplingParams:
    decided: dict[str, int] = {}
    if body.is_echo_only:
        decided["max_tokens"] = 1  # the engine generates at least one, which is then dropped
    if body.echo and body.logprobs is not None:
        decided["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return body.sampling_params(context.client.defaults.sampling, **decided)


def _text(context: Context, prompt: Prompt, body: CompletionRequest) -> str:
    if isinstance(prompt, str):
        return prompt
    return context.client.tokenizer.decode(prompt, body.skip_special_tokens is not False)


async def _without_output(
    deltas: AsyncGenerator[PromptDelta, None],
) -> AsyncGenerator[PromptDelta, None]:
    async with aclosing(deltas):
        async for prompt_index, delta in deltas:
            yield (
                prompt_index,
                msgspec.structs.replace(
                    delta,
                    text="",
                    token_ids=(),
                    logprobs=None if delta.logprobs is None else (),
                    finish_reason=delta.finish_reason and FinishReason.LENGTH,
                    stop_reason=None,
                ),
            )
