"""POST /v1/completions: how it answers. What it takes: `requests/completion.py`."""

import time
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Literal

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from msgspec import UNSET, UnsetType

from legato.core.outputs import TokenLogprobs
from legato.engine.frontend.completion import Completion, CompletionDelta
from legato.engine.frontend.kv_tickets import KVTransferParams
from legato.model.vocabulary import Vocabulary
from legato.server.context import ArrivalDep, ContextDep
from legato.server.generation.answer import respond
from legato.server.generation.answer_format import Usage
from legato.server.generation.chunks import InChunks, UsageField
from legato.server.generation.job import Job
from legato.server.http.bodies import JsonBytes
from legato.server.openai.logprobs import (
    CompletionLogprobs,
    CompletionLogprobsWriter,
    PromptLogprobs,
    prompt_logprobs,
)
from legato.server.openapi import responses, takes
from legato.server.requests.completion import CompletionRequest
from legato.server.requests.outcome import Generation

router = APIRouter(tags=["OpenAI"])


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """All but the first four are vLLM's.

    Attributes:
        prompt_token_ids: where `return_token_ids` asks for them; of a stream, in the first chunk.
        token_ids: likewise, of this piece.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, or a chunk of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageField = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET


class CompletionFormat:
    """Words the answers to one request."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        asked: Generation,
        job: Job,
        *,
        answer_id: str,
        created: int,
        model: str,
        ticket: KVTransferParams | None = None,
    ) -> None:
        self._ticket = ticket
        self._vocabulary = vocabulary
        self._asked = asked
        self._job = job
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
        return msgspec.structs.replace(
            self._answer(choices, usage), kv_transfer_params=self._ticket or UNSET
        )

    def chunk(self, choice: int, delta: CompletionDelta, usage: UsageField) -> CompletionAnswer:
        is_first = choice not in self._writers
        prefix = self._echoed_text(choice) if is_first else ""
        piece = CompletionChoice(
            index=choice,
            text=prefix + delta.text,
            logprobs=self._logprobs(choice, delta.logprobs),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            prompt_token_ids=self._prompt_tokens(choice) if is_first else UNSET,
            token_ids=self._tokens(delta.token_ids),
        )
        return self._answer([piece], usage)

    def usage_chunk(self, usage: Usage) -> CompletionAnswer:
        return self._answer([], usage)

    def _choice(self, completion: Completion, scored: Sequence[TokenLogprobs]) -> CompletionChoice:
        wants_scores = self._asked.shows_prompt_logprobs
        return CompletionChoice(
            index=completion.index,
            text=self._echoed_text(completion.index) + completion.text,
            logprobs=self._whole_logprobs(completion, scored),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            prompt_logprobs=prompt_logprobs(self._vocabulary, scored) if wants_scores else UNSET,
            prompt_token_ids=self._prompt_tokens(completion.index),
            token_ids=self._tokens(completion.token_ids),
        )

    def _prompt_tokens(self, choice: int) -> list[int] | UnsetType:
        return self._tokens(self._job.prompts[choice // self._job.params.n])

    def _tokens(self, token_ids: Iterable[int]) -> list[int] | UnsetType:
        return list(token_ids) if self._asked.returns_token_ids else UNSET

    def _whole_logprobs(
        self, completion: Completion, scored: Sequence[TokenLogprobs]
    ) -> CompletionLogprobs | None:
        if self._asked.echoed is None or completion.logprobs is None:
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
                self._vocabulary,
                num_top=self._job.params.logprobs or 0,
                skip_special_tokens=self._job.params.skip_special_tokens,
            )
        return self._writers[choice]

    def _echoed_text(self, choice: int) -> str:
        if self._asked.echoed is None:
            return ""
        return self._asked.echoed[choice // self._job.params.n]

    def _answer(self, choices: list[CompletionChoice], usage: UsageField) -> CompletionAnswer:
        return CompletionAnswer(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )


@router.post(
    "/v1/completions",
    openapi_extra=takes(CompletionRequest),
    responses=responses(
        CompletionAnswer,
        errors=(HTTPStatus.NOT_FOUND, HTTPStatus.INTERNAL_SERVER_ERROR),
        streams=True,
    ),
)
async def create_completion(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Complete one prompt or several."""
    asked, prompts = await context.text.generation("completions", body, arrival.tenant)
    tickets = context.engine.tickets
    transfer = tickets.transfer(asked.kv_transfer_params)
    job = Job.of(asked, prompts, arrival=arrival, operation="text_completion", kv_transfer=transfer)
    answer_format = CompletionFormat(
        context.engine.vocabulary,
        asked,
        job,
        answer_id=f"cmpl-{arrival.answer_id}",
        created=int(time.time()),
        model=context.model_name,
        ticket=tickets.told(transfer),
    )
    return await respond(context, job, InChunks(answer_format, job, asked))
