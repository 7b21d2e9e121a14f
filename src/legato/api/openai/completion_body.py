"""The body of POST /v1/completions, and the job made of it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from legato.api.bodies.answer_size import check_answer_size
from legato.api.bodies.as_chat import ChatBody
from legato.api.bodies.body_model import JobMaker, Prompt, only, validated
from legato.api.bodies.generation_options import GenerationRequest, NumLogprobs
from legato.api.job import End, Job, JobPrompt, Part, packed
from legato.core.errors import InvalidRequestError, naming_fields
from legato.core.sampling_params import MAX_N, SamplingParams
from legato.core.token_ids import TokenIds, token_array
from legato.engine.client.requests import last_tokens


def as_prompts(value: Any) -> list[Prompt]:
    """Return a list of prompts, from any of the four forms of `prompt`."""
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
_PROMPTS = {"type": "array", "items": {"anyOf": [{"type": "string"}, _TOKEN_IDS]}, "minItems": 1}
PROMPT_SCHEMA = {"anyOf": [{"type": "string"}, _PROMPTS, _TOKEN_IDS]}


def _unless_false(value: Any) -> Any:
    """Read `false` as none, as in chat."""
    return None if value is False else value


class CompletionRequest(GenerationRequest):
    """Prompts to complete, however they were sent."""

    prompt: Annotated[
        list[Prompt],
        Field(fail_fast=True),
        BeforeValidator(as_prompts),
        WithJsonSchema(PROMPT_SCHEMA),
    ]
    """Text, token ids, or a list of either."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens to texts."""
    echo: bool = False
    """Repeat the prompt before the completion."""
    logprobs: Annotated[NumLogprobs | None, BeforeValidator(_unless_false)] = None
    """Log probabilities of this many tokens beside the sampled one."""
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    """Must be 1 or equal `n`."""
    suffix: Annotated[str, only("")] | None = None
    """Filling in the middle is not supported."""

    @model_validator(mode="after")
    def _check_together(self) -> "CompletionRequest":
        if self.best_of not in (None, 1, self.n):
            raise InvalidRequestError("best_of must be 1 or equal n", param="best_of")
        if self.kv_transfer_params is not None and len(self.prompt) > 1:
            raise InvalidRequestError(
                "kv_transfer_params are of one prompt", param="kv_transfer_params"
            )
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError(
                "max_tokens must be at least 1, or 0 with echo: true", param="max_tokens"
            )
        if self.echo and self.logprob_token_ids:
            raise InvalidRequestError(
                "logprob_token_ids is not available with echo", param="logprob_token_ids"
            )
        if self.stream and self.echo and self.logprobs is not None:
            raise InvalidRequestError(
                "echo with logprobs is not available with stream: true", param="echo"
            )
        return self

    @property
    def is_echo_only(self) -> bool:
        """Whether the answer has only the prompt, perhaps with scores."""
        return self.max_tokens == 0


class CompletionJobs(JobMaker):
    """Makes jobs of requests for completions."""

    def read(self, body: bytes, *, is_rendered: bool = False) -> Iterator[Part | End]:
        """Yield warnings, and the job of a body.

        Args:
            is_rendered: whether the prompts are the answer.

        Raises:
            Exception: as `RequestReader.read`.
        """
        yield from self._read(self._parser.parse(CompletionRequest, body), is_rendered=is_rendered)

    def read_other(self, shared: Mapping[str, Any], body: ChatBody) -> Iterator[Part | End]:
        """Yield warnings, and the job of another API's request, which by default fills the context.

        Args:
            shared: as of `ChatJobs.read_other`.
            body: the request as a completion.
        """
        with body.naming_fields():
            request = validated(CompletionRequest, {**shared, **body.fields})
            yield from body.renamed_parts(self._read(request, bounds_output=True))

    def _read(
        self, request: CompletionRequest, *, bounds_output: bool = False, is_rendered: bool = False
    ) -> Iterator[Part | End]:
        """Args: bounds_output: as of `ChatJobs.read_other`."""
        yield from request.unheeded
        yield from request.unheeded_settings(self._info.max_model_len)
        self._parser.check_completions(request.n, len(request.prompt))
        params = self._params(request)
        capped = self._parser.capped(params)
        self._parser.check_prompts(
            request.prompt, is_cut=request.truncate_prompt_tokens is not None
        )
        has_offsets = is_rendered and request.return_token_offsets
        prompts: list[JobPrompt] = []
        echoed: list[str] = []
        echo_starts: list[TokenIds] = []
        for prompt in request.prompt:
            token_ids = self._token_ids(prompt, request)
            kept = last_tokens(token_ids, capped, self._info.max_model_len)
            if request.echo:
                echoed.append(self._echo(prompt, kept, request))
                echo_starts.append(self._echo_starts(prompt, request))
            offsets = self._offsets(prompt, request) if has_offsets else None
            prompts.append(JobPrompt.of(kept, offsets))
        longest = max(len(prompt.token_ids) for prompt in prompts)
        if bounds_output and request.max_tokens is None:
            params = msgspec.structs.replace(params, max_tokens=None)
        params = yield from self._limited(params, longest)
        room = self._info.max_model_len - longest
        if bounds_output and params.max_tokens is not None and 0 < room < params.max_tokens:
            params = msgspec.structs.replace(params, max_tokens=room)
        job = Job(
            operation="text_completion",
            prompts=tuple(prompts),
            params=params,
            service=request.service_params(),
            answer=request.answer_options(
                echoed=tuple(echoed) if request.echo else None,
                echo_starts=tuple(echo_starts),
                is_echo_only=request.is_echo_only,
                num_prompt_logprobs=request.prompt_logprobs,
            ),
            kv_transfer_params=request.kv_transfer,
            terms=packed(request.render_terms() if is_rendered else None),
        )
        if not request.stream:
            check_answer_size(job, self._info.max_model_len)
        yield job

    def _params(self, request: CompletionRequest) -> SamplingParams:
        decided: dict[str, int | None] = {}
        if request.max_tokens is None and self._default_limit is not None:
            decided["max_tokens"] = None
        if request.is_echo_only:
            decided["max_tokens"] = 1  # the engine generates at least one token; it is dropped
        if request.echo and request.logprobs is not None:
            decided["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
        params = request.sampling_params(self._defaults.sampling, **decided)
        with naming_fields(**request.form_names):
            params = self._forms.resolved(params)
        return self._known(params)

    def _token_ids(self, prompt: Prompt, request: CompletionRequest) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, request.add_special_tokens)
        return prompt

    def _offsets(self, prompt: Prompt, request: CompletionRequest) -> list[tuple[int, int]] | None:
        if not isinstance(prompt, str):
            return None
        return self._tokenizer.offsets(prompt, add_special_tokens=request.add_special_tokens)

    def _echo(self, prompt: Prompt, token_ids: Sequence[int], request: CompletionRequest) -> str:
        """Args: token_ids: of the prompt, after truncation."""
        if request.truncate_prompt_tokens is None and isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(list(token_ids), request.skip_special_tokens is not False)

    def _echo_starts(self, prompt: Prompt, request: CompletionRequest) -> TokenIds:
        is_text = request.truncate_prompt_tokens is None and isinstance(prompt, str)
        if request.logprobs is None or not is_text:
            return token_array(())
        added = request.add_special_tokens
        return token_array(self._tokenizer.starts(str(prompt), add_special_tokens=added))
