"""Collects a trace's records of one request."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from legato.core.errors import ConfigError
from legato.core.step_record import (
    AnswerRecord,
    BlocksFetched,
    ChunkRecord,
    GrammarReady,
    RequestArrived,
    RequestEnded,
    StepRecord,
)
from legato.observe.traces.trace_file import RecordsDropped, TraceLine, read_trace

_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")


class ObservedStep:
    """A step, with values that are computed once for all requests in it.

    Attributes:
        chunks: key request id.
        num_prefill, num_decode, num_drafts: tokens; `num_decode` does not include drafts.
    """

    __slots__ = ("chunks", "num_decode", "num_drafts", "num_prefill", "record")

    def __init__(self, record: StepRecord) -> None:
        self.record = record
        self.chunks = {chunk.request_id: chunk for chunk in record.chunks}
        self.num_drafts = record.num_draft_tokens
        self.num_decode = record.num_decode_tokens - self.num_drafts
        self.num_prefill = record.num_prefill_tokens


class RequestStory(msgspec.Struct, kw_only=True):
    """One completion, from its arrival to its end, as far as the trace goes.

    Attributes:
        request_id: the engine's.
        choice: index of the completion in the answer.
        replica_ids: replicas of a fleet that had it, in order: more than one if a replica refused
            it or died.
        steps: all steps that ran while the engine held it, with or without its chunks.
        num_dropped: records missing in the meantime.
    """

    request_id: str
    choice: int = 0
    answer: AnswerRecord | None = None
    arrived: RequestArrived | None = None
    grammar: GrammarReady | None = None
    fetched: BlocksFetched | None = None
    ended: RequestEnded | None = None
    replica_ids: list[str] = msgspec.field(default_factory=list)
    steps: list[ObservedStep] = msgspec.field(default_factory=list)
    num_dropped: int = 0

    def add_step(self, step: ObservedStep) -> None:
        """Add a step that ran while the engine held the request.

        Steps before its first record and steps of other replicas are ignored.
        """
        replica_id = step.record.replica_id
        is_known = self.arrived is not None or bool(self.steps)
        if not is_known and self.request_id in step.chunks:
            is_known = True
            self.be_at(replica_id)
        if is_known and (not self.replica_ids or self.replica_ids[-1] == replica_id):
            self.steps.append(step)

    def be_at(self, replica_id: str) -> None:
        """Record that the request is at a replica."""
        if not self.replica_ids or self.replica_ids[-1] != replica_id:
            self.replica_ids.append(replica_id)

    def own_chunks(self) -> Iterator[tuple[StepRecord, ChunkRecord]]:
        """Yield its computed chunks with their steps."""
        for step in self.steps:
            chunk = step.chunks.get(self.request_id)
            if chunk is not None and self.request_id not in step.record.failed:
                yield step.record, chunk

    def goes_by(self, asked: str, choice: int) -> bool:
        """Whether `asked` is its id: the engine's, `X-Request-Id`, or the answer's id."""
        if asked == self.request_id:
            return True
        name = asked
        for prefix in _ANSWER_PREFIXES:
            name = name.removeprefix(prefix)
        if self.answer is not None:
            is_named = asked == self.answer.http_id or name == self.answer.answer_id
            return is_named and self.choice == choice
        return bool(re.fullmatch(rf"\d+-{re.escape(name)}-{choice}", self.request_id))


def read_story(path: Path, asked: str, choice: int = 0) -> RequestStory:
    """Return a trace's records of one request.

    Args:
        asked: the engine's id, `X-Request-Id`, or the answer's id; if several requests have it, the
            last that ended is returned.
        choice: index of the completion in the answer; not needed with an engine's id.

    Raises:
        ConfigError: the trace cannot be read, or has no such request.
    """
    found = None
    for story in read_stories(path):
        if story.goes_by(asked, choice):
            found = story
    if found is None:
        raise ConfigError(f"{path} has no request {asked!r} with a choice {choice}")
    return found


def read_stories(path: Path) -> Iterator[RequestStory]:
    """Yield each request of a trace of lines of JSON, in the order of their ends.

    The file is read once, and a step is kept only while a story has it, so the file may be large.

    Raises:
        ConfigError: the trace cannot be read; also raised by the iterator.
    """
    header, lines = read_trace(path)
    stories = _Stories(has_answers=header.unix_s is not None)
    for line in lines:
        yield from stories.take(line)
    yield from stories.unfinished()


class _Stories:
    """Stories that are not complete yet.

    Args:
        has_answers: whether the requests came by HTTP, so that an answer ends a story.
    """

    def __init__(self, *, has_answers: bool) -> None:
        self._has_answers = has_answers
        self._running: dict[str, RequestStory] = {}
        self._unanswered: dict[str, RequestStory] = {}  # requests that have left the engine
        # Key id of a request that steps in flight may still hold; value its end and its replica.
        self._ended: dict[str, tuple[float, str]] = {}

    def take(self, line: TraceLine) -> Iterator[RequestStory]:
        """Yield the stories that a line completes."""
        match line:
            case RequestArrived():
                story = self._again(line.request_id)
                story.arrived = story.arrived or line
                story.be_at(line.replica_id)
            case GrammarReady():
                story = self._of(line.request_id)
                story.grammar = story.grammar or line
            case BlocksFetched():
                story = self._of(line.request_id)
                story.fetched = story.fetched or line
            case StepRecord():
                self._see(ObservedStep(line))
            case RequestEnded():
                yield from self._end(line)
            case AnswerRecord():
                yield from self._answer(line)
            case RecordsDropped():
                for story in self._running.values():
                    story.num_dropped += line.num_records

    def unfinished(self) -> Iterator[RequestStory]:
        """Yield the stories without an end in the trace."""
        yield from self._unanswered.values()
        yield from self._running.values()

    def _of(self, request_id: str) -> RequestStory:
        story = self._running.get(request_id)
        if story is None:
            story = self._running[request_id] = RequestStory(request_id=request_id)
        return story

    def _again(self, request_id: str) -> RequestStory:
        """Return the story of an arriving request; another replica may have refused it before."""
        refused = self._unanswered.pop(request_id, None)
        if refused is not None:
            self._running[request_id] = refused
        return self._of(request_id)

    def _see(self, step: ObservedStep) -> None:
        planned_s, replica_id = step.record.planned_s, step.record.replica_id
        self._ended = {
            name: (at_s, where)
            for name, (at_s, where) in self._ended.items()
            if at_s > planned_s or where != replica_id
        }
        for request_id in step.chunks:
            if request_id not in self._ended:
                self._of(request_id)  # a new story if the request came before the trace began
        for story in self._running.values():
            story.add_step(step)

    def _end(self, ended: RequestEnded) -> Iterator[RequestStory]:
        story = self._of(ended.request_id)
        story.ended = ended
        where = story.replica_ids[-1] if story.replica_ids else ""
        self._ended[ended.request_id] = ended.ended_s, where
        del self._running[ended.request_id]
        if story.answer is not None or not self._has_answers:
            yield story
        else:
            self._unanswered[ended.request_id] = story

    def _answer(self, answer: AnswerRecord) -> Iterator[RequestStory]:
        for choice, request_id in answer.request_ids.items():
            ended = self._unanswered.pop(request_id, None)
            story = ended or self._of(request_id)
            story.answer, story.choice = answer, choice
            if ended is not None:
                yield ended
