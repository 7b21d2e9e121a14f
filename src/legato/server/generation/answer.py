"""From the deltas of a job to the answer to its HTTP request: one JSON object, or a stream."""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Protocol

import msgspec
from fastapi.responses import Response

from legato.engine.frontend.completion import Completion, CompletionDelta
from legato.server.generation.job import Job, PromptDelta
from legato.server.http.bodies import DONE, EventStream, encode_json, event, json_response
from legato.server.http.errors import as_api_error
from legato.server.requests.outcome import Generation

logger = logging.getLogger(__name__)


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """OpenAI's usage object."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


UsageField = Usage | None | msgspec.UnsetType


class AnswerFormat(Protocol):
    """How one endpoint words its answers."""

    def answer(self, completions: list[Completion], usage: Usage) -> msgspec.Struct:
        """All completions at once, in the order of their choice index."""

    def chunk(self, choice: int, delta: CompletionDelta, usage: UsageField) -> msgspec.Struct:
        """One piece of one completion."""

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """The end of a stream that was to tell its usage."""


async def respond(
    job: Job,
    deltas: AsyncGenerator[PromptDelta, None],
    answer_format: AnswerFormat,
    asked: Generation,
) -> Response:
    """Answer as the request asks. Errors before the first delta have a status of their own.

    Raises:
        Exception: as `run_job`.
    """
    if not asked.is_streamed:
        return json_response(await _collect(job, deltas, answer_format))
    first = await anext(deltas)
    writer = _ChunkWriter(job, answer_format, asked)
    return EventStream(_events(first, deltas, writer))


async def _collect(
    job: Job, deltas: AsyncGenerator[PromptDelta, None], answer_format: AnswerFormat
) -> msgspec.Struct:
    usage = _UsageCounter(job.prompts)
    completions = [Completion(choice) for choice in range(job.num_choices)]
    async with aclosing(deltas):
        async for prompt_index, delta in deltas:
            usage.add(prompt_index, delta)
            completions[job.choice(prompt_index, delta)].add(delta)
    return answer_format.answer(completions, usage.so_far)


class _UsageCounter:
    """Counts what the deltas of one request bring; its prompts count once each."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self._num_prompt_tokens = sum(map(len, prompts))
        self._num_cached_tokens = [0] * len(prompts)
        self._num_output_tokens = 0

    def add(self, prompt_index: int, delta: CompletionDelta) -> None:
        self._num_output_tokens += len(delta.token_ids)
        num_cached = delta.output.num_cached_tokens
        if delta.index == 0 and num_cached:
            self._num_cached_tokens[prompt_index] = num_cached

    @property
    def so_far(self) -> Usage:
        return Usage(
            self._num_prompt_tokens,
            self._num_output_tokens,
            self._num_prompt_tokens + self._num_output_tokens,
            PromptTokensDetails(sum(self._num_cached_tokens)),
        )


class _ChunkWriter:
    """Words deltas as events."""

    def __init__(self, job: Job, answer_format: AnswerFormat, asked: Generation) -> None:
        self._job = job
        self._format = answer_format
        self._asked = asked
        self._usage = _UsageCounter(job.prompts)

    def delta(self, prompt_index: int, delta: CompletionDelta) -> bytes:
        self._usage.add(prompt_index, delta)
        choice = self._job.choice(prompt_index, delta)
        return event(encode_json(self._format.chunk(choice, delta, self._usage_field)))

    def end(self) -> bytes:
        """What follows the last delta."""
        if not self._asked.include_usage:
            return DONE
        return event(encode_json(self._format.usage_chunk(self._usage.so_far))) + DONE

    @property
    def _usage_field(self) -> UsageField:
        if self._asked.continuous_usage_stats:
            return self._usage.so_far
        return None if self._asked.include_usage else msgspec.UNSET


async def _events(
    first: PromptDelta, deltas: AsyncGenerator[PromptDelta, None], writer: _ChunkWriter
) -> AsyncGenerator[bytes, None]:
    async with aclosing(deltas):
        try:
            yield writer.delta(*first)
            async for prompt_index, delta in deltas:
                yield writer.delta(prompt_index, delta)
            yield writer.end()
        except Exception as error:
            api_error = as_api_error(error)
            if api_error.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                logger.exception("a stream failed")
            yield event(api_error.body) + DONE
