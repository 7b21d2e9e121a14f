"""Ollama's endpoints: their answers, whole or a line for each piece."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import UNSET, UnsetType

from legato.api.answer import AnswerTimes, NotedAnswer, notes_of, respond, respond_whole
from legato.api.arrival import Arrival
from legato.api.bodies.body_model import Kind
from legato.api.context import ApiContext, ArrivalDep, ContextDep
from legato.api.http.bodies import (
    JSON_LINES,
    AnyJsonBytes,
    json_line,
    json_response,
    pieces_response,
)
from legato.api.http.error_responses import OllamaErrorBody
from legato.api.http.errors import ApiError
from legato.api.http.json_text import json_pieces, listed
from legato.api.job import Job, Piece
from legato.api.ollama.described_model import (
    OllamaModels,
    OllamaNamedRequest,
    OllamaRunningModels,
    OllamaShown,
    OllamaStatus,
)
from legato.api.ollama.ollama_body import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaMessageAnswer,
)
from legato.api.openai.embedding_answer import PooledVectors
from legato.api.openai.embedding_body import EmbeddingTerms
from legato.api.openai.logprobs import LogprobsWriter, TokenLogprob
from legato.api.openapi import body_route, responses
from legato.api.submit import JobRun
from legato.core.outputs import FinishReason
from legato.core.vocabulary import Vocabulary
from legato.language.completion import Completion, CompletionDelta
from legato.language.embedding import finished_embedding
from legato.language.message.message import MessageReader, ToolCallDelta, read_message

router = APIRouter(tags=["Ollama"])

_NS = 10**9


class OllamaCall(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any]
    index: int


class OllamaToolCall(msgspec.Struct, frozen=True):
    id: str
    function: OllamaCall


class OllamaCalledAnswer(OllamaMessageAnswer, frozen=True, kw_only=True):
    """Attributes: `tool_calls` are whole calls."""

    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class OllamaTurn(NotedAnswer, frozen=True, kw_only=True):
    """An answer, or a line of it; all fields but the first three are on the last line alone.

    Attributes:
        total_duration: from the request's arrival to the answer's end, in nanoseconds.
        load_duration: the model is loaded already.
        prompt_eval_count: tokens of the prompt, cached ones too.
        prompt_eval_duration: from the request's first step to its first token, in nanoseconds.
        eval_count, eval_duration: tokens of the output, and the nanoseconds after the first one.
    """

    model: str
    created_at: datetime
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET


class OllamaChatAnswer(OllamaTurn, frozen=True, kw_only=True):
    message: OllamaCalledAnswer


class OllamaGenerateAnswer(OllamaTurn, frozen=True, kw_only=True):
    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbedAnswer(NotedAnswer, frozen=True, kw_only=True):
    """Attributes: durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(msgspec.Struct, frozen=True):
    embedding: list[float]


class OllamaVersionAnswer(msgspec.Struct, frozen=True):
    version: str


class OllamaFormat(ABC):
    """The `AnswerFormat` of one answer, and its `WholeAnswer` and `EventWriter`."""

    def __init__(self, job: Job, arrival: Arrival, vocabulary: Vocabulary, model: str) -> None:
        self._job = job
        self._arrival = arrival
        self._model = model
        self._reader = MessageReader(job.answer.message_syntax)
        self._logprobs = LogprobsWriter(vocabulary)
        self._completion = Completion(0)  # of a whole answer
        self._calls: list[tuple[ToolCallDelta, list[str]]] = []  # that are not complete
        self._num_calls = 0
        self._num_output_tokens = 0
        self._times = AnswerTimes()
        self._finish_reason: FinishReason | None = None

    def whole(self) -> "OllamaFormat":
        return self

    def events(self) -> "OllamaFormat":
        return self

    def take(self, _choice: int, delta: CompletionDelta) -> None:
        self._note(delta)
        self._completion.add(delta)

    def pieces(self) -> Iterable[bytes]:
        done = self._completion
        message = read_message(
            done.text, done.finish_reason, self._job.answer.message_syntax, done.stop_reason
        )
        parts = [
            ToolCallDelta(index=index, id=call.id, name=call.name, arguments=call.arguments)
            for index, call in enumerate(message.tool_calls)
        ]
        calls, odd = self._called(parts, is_end=True)
        scored: Any = UNSET
        if done.logprobs is not None:
            scored = listed(self._logprobs.chat_entries(done.logprobs))
        text = (message.content or "") + odd
        return json_pieces(
            self._turn(text, message.reasoning or "", calls, logprobs=scored, **self._end())
        )

    def delta(self, _choice: int, delta: CompletionDelta) -> bytes:
        self._note(delta)
        message = self._reader.feed(delta.text, delta.finish_reason, delta.stop_reason)
        calls: list[OllamaToolCall] = []
        text = message.content
        if message.tool_calls or self._calls:
            calls, odd = self._called(message.tool_calls, is_end=delta.finish_reason is not None)
            text += odd
        scored: Any = UNSET
        if delta.logprobs:
            scored = self._logprobs.chat_entries(delta.logprobs)
        if not (text or message.reasoning or calls or scored):
            return b""
        return json_line(self._turn(text, message.reasoning, calls, done=False, logprobs=scored))

    def end(self) -> list[bytes]:
        return [json_line(self._turn("", "", [], **self._end()))]

    def failed(self, error: ApiError) -> list[bytes]:
        return [json_line(OllamaErrorBody(error.detail.message))]

    @abstractmethod
    def _turn(
        self, text: str, thinking: str, calls: list[OllamaToolCall], /, **known: Any
    ) -> OllamaTurn:
        """Return an answer or a line. Args: known: further fields."""

    def _end(self) -> dict[str, Any]:
        """Return the fields of the last line."""
        is_full = self._finish_reason is FinishReason.LENGTH
        return {
            "done": True,
            "done_reason": "length" if is_full else "stop",
            "total_duration": _nanoseconds(time.monotonic() - self._arrival.received_s),
            "load_duration": 0,
            "prompt_eval_count": self._job.num_prompt_tokens,
            "prompt_eval_duration": _nanoseconds(self._times.prompt_s),
            "eval_count": self._num_output_tokens,
            "eval_duration": _nanoseconds(self._times.output_s),
            "legato": notes_of(self._arrival),
        }

    def _note(self, delta: CompletionDelta) -> None:
        self._num_output_tokens += len(delta.token_ids)
        self._times.add(delta)
        self._finish_reason = delta.finish_reason

    def _called(
        self, parts: Sequence[ToolCallDelta], *, is_end: bool
    ) -> tuple[list[OllamaToolCall], str]:
        """Return complete calls, and the arguments of other calls, which are no JSON object."""
        for part in parts:
            if part.name is not None:
                self._calls.append((part, []))
            self._calls[-1][1].append(part.arguments)
        complete = self._calls if is_end else self._calls[:-1]
        self._calls = self._calls[len(complete) :]
        called: list[OllamaToolCall] = []
        odd = ""
        for first, pieces in complete:
            text = "".join(pieces)
            try:
                arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
            except (msgspec.DecodeError, RecursionError):
                odd += text
                continue
            call = OllamaCall(first.name or "", arguments, self._num_calls)
            called.append(OllamaToolCall(first.id or "", call))
            self._num_calls += 1
        return called, odd


class OllamaChatFormat(OllamaFormat):
    def _turn(
        self, text: str, thinking: str, calls: list[OllamaToolCall], /, **known: Any
    ) -> OllamaTurn:
        message = OllamaCalledAnswer(
            content=text, thinking=thinking or UNSET, tool_calls=calls or UNSET
        )
        return OllamaChatAnswer(
            message=message, model=self._model, created_at=datetime.now(UTC), **known
        )


class OllamaGenerateFormat(OllamaFormat):
    def _turn(
        self, text: str, thinking: str, _calls: list[OllamaToolCall], /, **known: Any
    ) -> OllamaTurn:
        return OllamaGenerateAnswer(
            response=text,
            thinking=thinking or UNSET,
            model=self._model,
            created_at=datetime.now(UTC),
            **known,
        )


class _VectorsWriter(PooledVectors):
    """A `WholeAnswer` of vectors."""

    def __init__(self, job: Job, arrival: Arrival, model: str, *, is_old: bool) -> None:
        super().__init__(job)
        self._terms = job.terms_as(EmbeddingTerms)
        self._arrival = arrival
        self._model = model
        self._is_old = is_old

    def pieces(self) -> Iterable[bytes]:
        size, is_normal = self._terms.dimensions, self._terms.normalizes
        vectors = (
            finished_embedding(pooled, dimensions=size, normalize=is_normal).tolist()
            for pooled in self
        )
        if self._is_old:
            return json_pieces(OllamaEmbeddingsAnswer(next(vectors)))
        return json_pieces(
            OllamaEmbedAnswer(
                model=self._model,
                embeddings=listed(vectors),
                total_duration=_nanoseconds(time.monotonic() - self._arrival.received_s),
                prompt_eval_count=self.usage.prompt_tokens,
                legato=notes_of(self._arrival),
            )
        )


def _nanoseconds(seconds: float) -> int:
    """Return a duration, at least one: clients divide by it."""
    return max(1, int(seconds * _NS))


async def _answer(
    kind: Kind, body: bytearray, context: ApiContext, arrival: Arrival, words: type[OllamaFormat]
) -> Response:
    parts, job = await context.text.read(kind, body, arrival)
    if not isinstance(job, Job):  # only to load the model
        context.engine.check_running()
        return pieces_response([part.data for part in parts if isinstance(part, Piece)])
    run = JobRun(context, job, arrival)
    answer_format = words(job, arrival, context.engine.vocabulary, context.model_name)
    return await respond(run, answer_format, JSON_LINES)


def _described(request: type, answer: type, **further: Any) -> dict[str, Any]:
    return body_route(request, answer, error_body=OllamaErrorBody, **further)


@router.post("/api/chat", **_described(OllamaChatRequest, OllamaChatAnswer, in_lines=True))
async def ollama_chat(body: AnyJsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Answer a conversation."""
    return await _answer("ollama_chat", body, context, arrival, OllamaChatFormat)


@router.post(
    "/api/generate", **_described(OllamaGenerateRequest, OllamaGenerateAnswer, in_lines=True)
)
async def ollama_generate(body: AnyJsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Answer a prompt."""
    return await _answer("ollama_generate", body, context, arrival, OllamaGenerateFormat)


@router.post("/api/embed", **_described(OllamaEmbedRequest, OllamaEmbedAnswer))
async def ollama_embed(body: AnyJsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Return a vector for each input."""
    job = await context.text.job("ollama_embed", body, arrival)
    writer = _VectorsWriter(job, arrival, context.model_name, is_old=False)
    return await respond_whole(JobRun(context, job, arrival), writer)


@router.post("/api/embeddings", **_described(OllamaEmbeddingsRequest, OllamaEmbeddingsAnswer))
async def ollama_embeddings(
    body: AnyJsonBytes, context: ContextDep, arrival: ArrivalDep
) -> Response:
    """Return the vector of a prompt, in Ollama's older form."""
    job = await context.text.job("ollama_embeddings", body, arrival)
    writer = _VectorsWriter(job, arrival, context.model_name, is_old=True)
    return await respond_whole(JobRun(context, job, arrival), writer)


@router.post("/api/show", **_described(OllamaNamedRequest, OllamaShown, is_computed=False))
async def ollama_show(body: AnyJsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Describe the model."""
    return pieces_response(await context.text.answer("ollama_show", body, arrival))


@router.post("/api/pull", **_described(OllamaNamedRequest, OllamaStatus, is_computed=False))
async def ollama_pull(body: AnyJsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Report that the model is present; others are not downloaded."""
    return pieces_response(await context.text.answer("ollama_pull", body, arrival))


@router.get("/api/tags", responses=responses(OllamaModels, error_body=OllamaErrorBody))
async def ollama_tags(context: ContextDep, arrival: ArrivalDep) -> Response:
    """List the names of the served model."""
    return pieces_response(await context.text.answer("ollama_tags", bytearray(), arrival))


@router.get("/api/ps", responses=responses(OllamaRunningModels, error_body=OllamaErrorBody))
async def ollama_ps(context: ContextDep, arrival: ArrivalDep) -> Response:
    """List the loaded model."""
    return pieces_response(await context.text.answer("ollama_ps", bytearray(), arrival))


@router.get("/api/version", responses=responses(OllamaVersionAnswer, error_body=OllamaErrorBody))
async def ollama_version(request: Request) -> Response:
    """Return a version of Ollama, which `--ollama-version` sets."""
    return json_response(OllamaVersionAnswer(request.app.state.ollama_version))
