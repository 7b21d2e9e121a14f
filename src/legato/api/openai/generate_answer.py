"""POST /inference/v1/generate: its answers. Its requests are in `generate_body.py`."""

from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from msgspec import UNSET, UnsetType

from legato.api.answer import Usage
from legato.api.context import ArrivalDep, ContextDep
from legato.api.http.bodies import JsonBytes
from legato.api.http.json_text import array, listed, numbers
from legato.api.job import Job
from legato.api.openai.chat_answer import ChatAnswerMessage, answer_message
from legato.api.openai.chunks import ChunkFormat, TimedAnswer, UsageField, respond_in_chunks
from legato.api.openai.generate_body import GenerateRequest, GenerateTerms, OutputMode
from legato.api.openai.logprobs import ChatLogprobs, PromptLogprobs, number
from legato.api.openapi import body_route
from legato.core.outputs import TokenLogprobs
from legato.core.vocabulary import Vocabulary
from legato.engine.client.kv_tickets import KVTransferParams
from legato.language.completion import Completion, CompletionDelta
from legato.language.message.message import read_message

router = APIRouter(tags=["tokenization"])


class IdLogprob(msgspec.Struct, frozen=True):
    """Attributes: `rank`: 1 for the most likely token; of `logprob_token_ids`, none is known."""

    token_id: int
    logprob: float
    rank: int | None


class SampledIdLogprob(IdLogprob, frozen=True):
    """Attributes: `top_logprobs`: the sampled token and then the most likely ones, each once."""

    top_logprobs: list[IdLogprob]


class IdLogprobs(msgspec.Struct, frozen=True):
    content: list[SampledIdLogprob]


class TokensChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: `stop_reason`: the stop string or token id that ended the output."""

    index: int
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int]
    logprobs: IdLogprobs | None


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """As `TokensChoice`, with the text."""

    index: int
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int]
    logprobs: ChatLogprobs | None


class DerenderedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """As `TokensChoice`, with the message that the text is."""

    index: int
    message: ChatAnswerMessage
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int]
    logprobs: ChatLogprobs | None


class _Answer(TimedAnswer, frozen=True, kw_only=True):
    request_id: str
    model: str | UnsetType = UNSET
    created: int | UnsetType = UNSET
    usage: UsageField = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    kv_transfer_params: KVTransferParams | UnsetType | None = UNSET


class TokensAnswer(_Answer, frozen=True, kw_only=True):
    """An answer, or a chunk of one.

    Attributes:
        output_mode: of the request; the reference shows this answer for all of them.
        prompt_token_ids: with `return_token_ids`; of a stream, in the first chunk.
        model, created, prompt_logprobs, kv_transfer_params: of whole answers.
    """

    output_mode: OutputMode = "tokens"
    choices: list[TokensChoice]


class TextAnswer(_Answer, frozen=True, kw_only=True):
    """As `TokensAnswer`."""

    output_mode: Literal["text"] = "text"
    choices: list[TextChoice]


class DerenderedAnswer(_Answer, frozen=True, kw_only=True):
    """As `TokensAnswer`."""

    output_mode: Literal["derender"] = "derender"
    choices: list[DerenderedChoice]


_ANSWERS: dict[OutputMode, Any] = {
    "tokens": TokensAnswer,
    "text": TextAnswer,
    "derender": DerenderedAnswer,
}


class GenerateFormat(ChunkFormat):
    """Formats answers in tokens."""

    def __init__(self, vocabulary: Vocabulary, job: Job, **known: Any) -> None:
        super().__init__(vocabulary, job, **known)
        self._mode = job.terms_as(GenerateTerms).output_mode
        self._has_begun = False

    def answer(self, completions: list[Completion], usage: Usage) -> TimedAnswer:
        scored = completions[0].prompt_scores
        return self._answer(
            listed(self._choice(own.index, own, own.text) for own in completions),
            model=self._model,
            created=self._created,
            usage=usage,
            prompt_logprobs=None if scored is None else array(self._logprobs.prompt(scored)),
            prompt_token_ids=self._tokens(self._job.prompts[0].token_ids) or None,
            kv_transfer_params=self._ticket,
        )

    def chunk(self, choice: int, delta: CompletionDelta, usage: UsageField) -> TimedAnswer:
        prompt = UNSET if self._has_begun else self._tokens(self._job.prompts[0].token_ids)
        self._has_begun = True
        piece = self._choice(choice, delta, delta.text)
        return self._answer([piece], usage=usage or None, prompt_token_ids=prompt)

    def usage_chunk(self, usage: UsageField) -> TimedAnswer:
        return self._answer([], usage=usage)

    def _answer(self, choices: list[Any], **fields: Any) -> TimedAnswer:
        answer: TimedAnswer = _ANSWERS[self._mode](request_id=self._id, choices=choices, **fields)
        return answer

    def _choice(
        self, index: int, output: Completion | CompletionDelta, text: str
    ) -> msgspec.Struct:
        common: dict[str, Any] = {
            "index": index,
            "stop_reason": output.stop_reason,
            "token_ids": array(numbers(output.token_ids)),
        }
        reason = output.finish_reason
        if self._mode == "tokens":
            logprobs = None
            if output.logprobs is not None:
                is_ranked = self._job.params.logprob_token_ids is None
                entries = (_id_entry(entry, is_ranked=is_ranked) for entry in output.logprobs)
                logprobs = IdLogprobs(array(entries))
            return TokensChoice(finish_reason=reason, logprobs=logprobs, **common)
        common["logprobs"] = self._logprobs.chat(output.logprobs)
        if self._mode == "text":
            return TextChoice(text=text, finish_reason=reason, **common)
        message = read_message(text, reason, self._job.answer.message_syntax, output.stop_reason)
        return DerenderedChoice(
            message=answer_message(message), finish_reason=message.finish_reason, **common
        )


def _id_entry(entry: TokenLogprobs, *, is_ranked: bool) -> bytes:
    """Args: is_ranked: whether `top` has the most likely tokens, not those of the request."""
    sampled = {entry.token_id: (entry.logprob, entry.rank)}
    others = {
        token_id: (logprob, rank if is_ranked else None)
        for rank, (token_id, logprob) in enumerate(entry.top, 1)
    }
    shown = sampled | others | sampled  # first, and with its own rank
    top = b",".join(_id_logprob(token_id, *one) for token_id, one in shown.items())
    return b'%b,"top_logprobs":[%b]}' % (
        _id_logprob(entry.token_id, entry.logprob, entry.rank)[:-1],
        top,
    )


def _id_logprob(token_id: int, logprob: float, rank: int | None) -> bytes:
    shown_rank = b"null" if rank is None else b"%d" % rank
    return b'{"token_id":%d,"logprob":%b,"rank":%b}' % (token_id, number(logprob), shown_rank)


@router.post(
    "/inference/v1/generate",
    **body_route(
        GenerateRequest, TokensAnswer, streams=True, variants=(TextAnswer, DerenderedAnswer)
    ),
)
async def generate(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Complete a prompt given in tokens."""
    job = await context.text.job("generate", body, arrival)
    answer_id = f"generate-tokens-{arrival.named(job.terms_as(GenerateTerms).request_id)}"
    return await respond_in_chunks(context, job, arrival, answer_id, GenerateFormat)
