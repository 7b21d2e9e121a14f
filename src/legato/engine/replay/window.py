"""The steps of a trace before a token, and the engine's state at each of them."""

import math
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from legato.core.outputs import FinishReason
from legato.core.step_record import (
    BlocksFetched,
    ChunkRecord,
    GrammarReady,
    RequestArrived,
    RequestEnded,
    StepRecord,
)
from legato.observe.traces.trace_file import RecordsDropped, ReplayBasis, TraceLine, read_trace
from legato.scheduler.step_shape import StepShape

_MOST_KEPT, MOST_REPLAYED = 512, 256
"""Steps before the token that are read, to learn from, and of these the most to replay."""
_INTERRUPTED = 1.3
"""A step that took so many times its prediction was interrupted."""

Signature = frozenset[tuple[str, int, int]]
"""What a step computes: request, start and number of tokens of each chunk."""


class HeldRequest:
    """How far a request has come: its row of tokens, and how many of them are computed."""

    def __init__(self, arrived: RequestArrived) -> None:
        self.arrived = arrived
        self.ready_s = arrived.taken_s  # when the scheduler got it
        self.num_output_tokens = self.num_computed_tokens = 0
        self.ended: RequestEnded | None = None

    def advance(self, chunk: ChunkRecord) -> None:
        """Take a computed chunk."""
        num_rejected = chunk.num_drafts - chunk.num_accepted if chunk.kind == "verify" else 0
        self.num_computed_tokens = chunk.start + chunk.num_tokens - num_rejected
        self.num_output_tokens += chunk.num_accepted + 1 if chunk.num_samples else 0

    @property
    def cut_s(self) -> float | None:
        """When it was aborted, or failed; None if it was not."""
        is_cut = self.ended and self.ended.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
        return self.ended.ended_s if self.ended and is_cut else None

    @property
    def num_final_tokens(self) -> int:
        """Output tokens at its end; a guess if the trace ends before it."""
        if self.ended is not None:
            return max(1, self.ended.num_output_tokens)
        return max(self.arrived.max_tokens or 0, self.num_output_tokens + MOST_REPLAYED)


class Window:
    """The steps of a trace up to a token, and the engine's state at any of them.

    Raises:
        ValueError: why the trace cannot be replayed.
        ConfigError: as `read_trace`.
    """

    def __init__(self, path: Path, until_s: float) -> None:
        header, lines = read_trace(path)
        if header.basis is None:
            raise ValueError(
                "the trace has no settings to replay with: a simulation or an older version wrote "
                "it, or a newer one"
            )
        self.basis: ReplayBasis = header.basis
        self.steps: list[StepRecord] = []
        self._states: dict[str, HeldRequest] = {}  # as of the first of `steps`
        self._fetched_s = -math.inf
        kept: deque[StepRecord] = deque()
        for line in lines:
            match line:
                case RecordsDropped() if not kept or kept[-1].ended_s < until_s:
                    raise ValueError("records before it are missing: writing could not keep up")
                case StepRecord() if line.planned_s < until_s:
                    kept.append(line)
                    if len(kept) > _MOST_KEPT:
                        self._pass(kept.popleft(), self._states)
                case _:
                    self._note(line, until_s)
        self.steps = list(kept)
        self._check()

    def _note(self, line: TraceLine, until_s: float) -> None:
        match line:
            case RequestArrived() if line.arrived_s <= until_s:
                self._states.setdefault(line.request_id, HeldRequest(line))
            case GrammarReady() if line.request_id in self._states:
                self._states[line.request_id].ready_s = line.ready_s
            case BlocksFetched() if line.begun_s < until_s:
                self._fetched_s = max(self._fetched_s, line.ended_s)
            case RequestEnded() if line.request_id in self._states:
                self._states[line.request_id].ended = line

    def _check(self) -> None:
        """Raises ValueError if a replay would be another engine's."""
        if self.steps and self._fetched_s >= self.steps[0].planned_s:
            raise ValueError("blocks of a prompt came from another engine meanwhile")
        if any(step.num_draft_tokens for step in self.steps):
            raise ValueError("its steps hold drafts, whose luck other plans would not have had")
        if any(step.replica_id for step in self.steps):
            raise ValueError("its steps are those of several replicas")
        if any(step.failed for step in self.steps):
            raise ValueError("one of its steps failed")
        known = self._states
        if any(chunk.request_id not in known for step in self.steps for chunk in step.chunks):
            raise ValueError("some of its requests came before the trace began")

    @staticmethod
    def _pass(step: StepRecord, states: dict[str, HeldRequest]) -> None:
        """Apply a step's result, and drop the requests that had ended before it."""
        for request_id in step.preempted:
            if request_id in states:
                states[request_id].num_computed_tokens = 0
        for chunk in step.chunks:
            if chunk.request_id in states:
                states[chunk.request_id].advance(chunk)
        over = [
            request_id
            for request_id, state in states.items()
            if state.ended is not None and state.ended.ended_s <= step.planned_s
        ]
        for request_id in over:
            del states[request_id]

    def states_at(self, index: int) -> dict[str, HeldRequest]:
        """Return requests that the engine holds, or will, at step `index`; key their id."""
        states = {}
        for request_id, before in self._states.items():
            state = states[request_id] = HeldRequest(before.arrived)
            state.num_output_tokens = before.num_output_tokens
            state.num_computed_tokens = before.num_computed_tokens
            state.ended, state.ready_s = before.ended, before.ready_s
        for step in self.steps[:index]:
            self._pass(step, states)
        begins_s = self.steps[index].planned_s
        return {
            request_id: state
            for request_id, state in states.items()
            if (state.ended is None or state.ended.ended_s > begins_s)
            and not (state.ended is not None and state.ended.finish_reason is FinishReason.REFUSED)
        }

    def first_step(self, since_s: float) -> int:
        """Return the first step to replay so that what came at `since_s` is new, if it can be."""
        least = max(0, len(self.steps) - MOST_REPLAYED)
        later = (i for i, step in enumerate(self.steps) if step.planned_s >= since_s)
        depth = self.basis.scheduler.num_steps_in_flight or 1
        return max(least, next(later, len(self.steps) - 1) - depth)


def is_stream(state: HeldRequest) -> bool:
    num_tokens = state.arrived.num_prompt_tokens + state.num_output_tokens
    return state.num_output_tokens > 0 and state.num_computed_tokens >= num_tokens - 1


def signature(chunks: Iterable[ChunkRecord]) -> Signature:
    return frozenset((chunk.request_id, chunk.start, chunk.num_tokens) for chunk in chunks)


def shape_of(step: StepRecord) -> StepShape:
    return StepShape.of_chunks(step.chunks)


def extra_s(step: StepRecord) -> float:
    """Return how long the machine was away during a step; 0 if that is unknown."""
    if step.predicted_s is None or step.seconds <= _INTERRUPTED * step.predicted_s:
        return 0.0
    return step.seconds - step.predicted_s
