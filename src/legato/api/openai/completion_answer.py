"""POST /v1/completions: its answers. Its requests are in `completion_body.py`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from msgspec import UNSET, Raw, UnsetType

from legato.api.answer import FINGERPRINT, Usage
from legato.api.context import ArrivalDep, ContextDep
from legato.api.http.bodies import JsonBytes
from legato.api.http.json_text import Kept, array, encode_json, listed, numbers
from legato.api.job import Job
from legato.api.openai.chunks import ChunkFormat, TimedAnswer, UsageField, respond_in_chunks
from legato.api.openai.completion_body import CompletionRequest
from legato.api.openai.logprobs import (
    CompletionLogprobs,
    CompletionLogprobsWriter,
    LogprobColumns,
    PromptLogprobs,
)
from legato.api.openapi import body_route
from legato.core.outputs import TokenScores
from legato.core.vocabulary import Vocabulary
from legato.engine.client.kv_tickets import KVTransferParams
from legato.language.completion import Completion, CompletionDelta

router = APIRouter(tags=["OpenAI"])


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice; all fields but the first four are vLLM's.

    Attributes:
        prompt_token_ids: with `return_token_ids`; of a stream, in the first chunk.
        token_ids: likewise, of this piece.

    A field that the request does not ask for is null in a whole answer, and absent in a chunk.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET


class CompletionAnswer(TimedAnswer, frozen=True, kw_only=True):
    """An answer, or a chunk of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageField = UNSET
    system_fingerprint: str = FINGERPRINT
    kv_transfer_params: KVTransferParams | UnsetType | None = UNSET


class _ShownPrompt(NamedTuple):
    """A prompt in JSON, shared by all its completions.

    Attributes:
        token_ids: items of `prompt_token_ids`.
        scores: items of `prompt_logprobs`.
        columns: items of `logprobs`, before those of the completion.
        writer: writes these columns.
    """

    token_ids: Iterable[bytes]
    scores: Iterable[bytes]
    columns: LogprobColumns
    writer: CompletionLogprobsWriter


class CompletionFormat(ChunkFormat):
    """Formats completions."""

    def __init__(self, vocabulary: Vocabulary, job: Job, **known: Any) -> None:
        super().__init__(vocabulary, job, **known)
        self._writers: dict[int, CompletionLogprobsWriter] = {}  # key: choice, once begun
        self._prompt_ids: dict[int, Raw] = {}  # key: prompt, once begun; value: JSON

    def answer(self, completions: list[Completion], usage: Usage) -> CompletionAnswer:
        return msgspec.structs.replace(
            self._answer(listed(self._choices(completions)), usage), kv_transfer_params=self._ticket
        )

    def chunk(self, choice: int, delta: CompletionDelta, usage: UsageField) -> CompletionAnswer:
        is_first = choice not in self._writers
        if is_first:
            self._writers[choice] = self._writer()
        logprobs = delta.logprobs
        prefix = self._echoed_text(choice) if is_first else ""
        piece = CompletionChoice(
            index=choice,
            text=prefix + delta.text,
            logprobs=None if logprobs is None else self._writers[choice].write(logprobs),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            prompt_token_ids=self._whole_prompt(choice) if is_first else UNSET,
            token_ids=self._tokens(delta.token_ids),
        )
        return self._answer([piece], usage)

    def usage_chunk(self, usage: UsageField) -> CompletionAnswer:
        return self._answer([], usage)

    def _choices(self, completions: Sequence[Completion]) -> Iterator[CompletionChoice]:
        num_per_prompt = self._job.params.n
        for index in range(len(self._job.prompts)):
            several = completions[index * num_per_prompt : (index + 1) * num_per_prompt]
            # The first completion has the prompt's scores, and each choice shows them.
            shown = self._shown_prompt(index, several[0].prompt_scores or ())
            yield from (self._choice(completion, shown) for completion in several)

    def _shown_prompt(self, index: int, scored: Sequence[TokenScores]) -> "_ShownPrompt":
        options, prompt = self._options, self._job.prompts[index].token_ids
        echoed = "" if options.echoed is None else options.echoed[index]
        starts = options.echo_starts[index] if options.echo_starts else ()
        keep: Callable[[Iterable[bytes]], Iterable[bytes]]
        keep = Kept if self._job.params.n > 1 else iter
        writer = self._writer()
        return _ShownPrompt(
            token_ids=keep(numbers(prompt)),
            scores=keep(self._logprobs.prompt(scored, options.num_prompt_logprobs)),
            columns=writer.prompt_columns(prompt, scored, echoed, starts).each(keep),
            writer=writer,
        )

    def _choice(self, completion: Completion, prompt: "_ShownPrompt") -> CompletionChoice:
        options = self._options
        return CompletionChoice(
            index=completion.index,
            text=self._echoed_text(completion.index) + completion.text,
            logprobs=self._whole_logprobs(completion, prompt),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            prompt_logprobs=None if options.num_prompt_logprobs is None else array(prompt.scores),
            prompt_token_ids=array(prompt.token_ids) if options.returns_token_ids else None,
            token_ids=self._tokens(completion.token_ids) or None,
        )

    def _whole_logprobs(
        self, completion: Completion, prompt: "_ShownPrompt"
    ) -> CompletionLogprobs | None:
        if completion.logprobs is None:
            return None
        if self._options.echoed is None:
            return self._writer().write(completion.logprobs)
        own = prompt.writer.columns_of_one(completion.logprobs)
        return LogprobColumns.joined(prompt.columns, own)

    def _writer(self) -> CompletionLogprobsWriter:
        params = self._job.params
        return CompletionLogprobsWriter(
            self._logprobs,
            num_top=params.num_shown_logprobs or 0,
            skip_special_tokens=params.skip_special_tokens,
        )

    def _whole_prompt(self, choice: int) -> Any:
        """Return the prompt's token ids, if the request asked for them."""
        if not self._options.returns_token_ids:
            return UNSET
        index = choice // self._job.params.n
        if index not in self._prompt_ids:
            self._prompt_ids[index] = Raw(encode_json(list(self._job.prompts[index].token_ids)))
        return self._prompt_ids[index]

    def _echoed_text(self, choice: int) -> str:
        if self._options.echoed is None:
            return ""
        return self._options.echoed[choice // self._job.params.n]

    def _answer(self, choices: list[CompletionChoice], usage: UsageField) -> CompletionAnswer:
        return CompletionAnswer(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )


@router.post("/v1/completions", **body_route(CompletionRequest, CompletionAnswer, streams=True))
async def create_completion(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Complete one or several prompts."""
    job = await context.text.job("completions", body, arrival)
    answer_id = f"cmpl-{arrival.answer_id}"
    return await respond_in_chunks(context, job, arrival, answer_id, CompletionFormat)
