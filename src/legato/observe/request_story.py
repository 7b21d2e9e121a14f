"""All that a trace holds of one request."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from legato.core.errors import ConfigError
from legato.core.step_record import (
    AnswerRecord,
    ChunkRecord,
    RequestArrived,
    RequestEnded,
    StepRecord,
)
from legato.observe.trace_file import RecordsDropped, read_trace

_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-")


class RequestStory(msgspec.Struct, kw_only=True):
    """One completion, from its arrival to its end, as far as the trace goes.

    Attributes:
        request_id: the engine's.
        choice: its index in the answer.
        steps: all that ran while the engine held it, its own and others'.
        num_dropped: records that are missing meanwhile.
    """

    request_id: str
    choice: int = 0
    answer: AnswerRecord | None = None
    arrived: RequestArrived | None = None
    ended: RequestEnded | None = None
    steps: list[StepRecord] = msgspec.field(default_factory=list)
    num_dropped: int = 0

    def chunk_in(self, step: StepRecord) -> ChunkRecord | None:
        """Its chunk in a step, if it has one."""
        return next((c for c in step.chunks if c.request_id == self.request_id), None)

    def own_chunks(self) -> Iterator[tuple[StepRecord, ChunkRecord]]:
        """Its chunks that were computed, with their steps."""
        for step in self.steps:
            chunk = self.chunk_in(step)
            if chunk is not None and self.request_id not in step.failed:
                yield step, chunk


def read_story(path: Path, asked: str, choice: int = 0) -> RequestStory:
    """What a trace of lines of JSON tells of a request.

    The file is read twice and what it holds of other times is not kept, so that it may be large.

    Args:
        asked: the engine's id, `X-Request-Id`, or the id of the answer; of requests with the same,
            it is the last.
        choice: which of the answer's completions; an engine's id needs none.

    Raises:
        ConfigError: it cannot be read, or has no such request.
    """
    story = _find(path, asked, choice)
    is_over = False
    for line in read_trace(path)[1]:
        match line:
            case RequestArrived() if line.request_id == story.request_id:
                story.arrived = story.arrived or line
            case StepRecord() if not is_over:
                if story.arrived is not None or story.steps or story.chunk_in(line) is not None:
                    story.steps.append(line)
            case RequestEnded() if line.request_id == story.request_id:
                story.ended, is_over = line, True
            case RecordsDropped() if not is_over:
                story.num_dropped += line.num_records
    return story


def _find(path: Path, asked: str, choice: int) -> RequestStory:
    http_id = asked
    for prefix in _ANSWER_PREFIXES:
        http_id = http_id.removeprefix(prefix)
    engines_id = re.compile(rf"\d+-{re.escape(http_id)}-{choice}")
    found: RequestStory | None = None
    for line in read_trace(path)[1]:
        match line:
            case RequestArrived() if line.request_id == asked or engines_id.fullmatch(
                line.request_id
            ):
                found = RequestStory(request_id=line.request_id, choice=choice)
            case AnswerRecord():
                found = _found_in(line, asked, http_id, choice) or found
    if found is None:
        raise ConfigError(f"{path} has no request {asked!r} with a choice {choice}")
    return found


def _found_in(answer: AnswerRecord, asked: str, http_id: str, choice: int) -> RequestStory | None:
    for index, request_id in answer.request_ids.items():
        if request_id == asked or (answer.http_id == http_id and index == choice):
            return RequestStory(request_id=request_id, choice=index, answer=answer)
    return None
