"""How far requests have come, told from records."""

import math
from collections import deque

from legato.core.outputs import FinishReason
from legato.core.step_record import (
    AnswerRecord,
    Record,
    RequestArrived,
    RequestEnded,
    StepRecord,
)

_MAX_ENDED = 4096
"""Requests that have left the engine and whose answers may still come."""


class Progress:
    """How far a request has come in the engine; times are None until they are known."""

    def __init__(self, arrived_s: float) -> None:
        self.arrived_s = arrived_s
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.preempted_s: list[float] = []
        self.ended_s = math.inf
        self.num_cached_tokens = 0


class Progresses:
    """Of the requests whose answers have not come to their end."""

    def __init__(self) -> None:
        self._progress: dict[str, Progress] = {}  # key request id
        self._ended: deque[str] = deque()

    def note(self, record: Record) -> None:
        match record:
            case RequestArrived():
                self._progress.setdefault(record.request_id, Progress(record.arrived_s))
            case StepRecord():
                self._note_step(record)
            case RequestEnded():
                self._note_end(record)

    def take(self, answer: AnswerRecord) -> list[Progress]:
        """Those of the answer's completions, which are forgotten."""
        found = (self._progress.pop(request_id, None) for request_id in answer.request_ids.values())
        return [progress for progress in found if progress is not None]

    def _note_step(self, step: StepRecord) -> None:
        for request_id in step.preempted:
            if request_id in self._progress:
                self._progress[request_id].preempted_s.append(step.planned_s)
        for request_id, num_cached_tokens in step.admitted.items():
            progress = self._progress.get(request_id)
            if progress is not None and progress.admitted_s is None:
                progress.admitted_s = step.planned_s
                progress.num_cached_tokens = num_cached_tokens
        for chunk in step.chunks:
            progress = self._progress.get(chunk.request_id)
            # A step that was in flight at a request's end may hold it, and brings nothing.
            if progress is not None and chunk.num_samples and step.ended_s <= progress.ended_s:
                progress.last_token_s = step.ended_s
                if progress.first_token_s is None:
                    progress.first_token_s = step.ended_s

    def _note_end(self, ended: RequestEnded) -> None:
        if ended.finish_reason is FinishReason.REFUSED:
            self._progress.pop(ended.request_id, None)
        elif ended.request_id in self._progress:
            self._progress[ended.request_id].ended_s = ended.ended_s
            self._ended.append(ended.request_id)
        while len(self._ended) > _MAX_ENDED:
            self._progress.pop(self._ended.popleft(), None)
