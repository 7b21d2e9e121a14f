"""The engine's activity, for metrics, the dashboard and traces."""

from collections.abc import Callable, Iterable

from legato.core.request import AddRequest
from legato.core.step_record import (
    EngineRecord,
    LiveRecord,
    Record,
    RequestSent,
    StepBegun,
    StepRecord,
    received,
)
from legato.observe.traces.feed import RecentSteps, RecordFeed


class Activity:
    """Collects the records of an engine and publishes them.

    Args:
        set_recording, set_announcing: called when `records`, or `live`, gets its first subscriber
            or loses its last.

    Attributes:
        on_step: called with each step.
        records: of the engine's work; made while there are subscribers.
        live: records of work that has just begun; likewise.
        recent: the latest steps, also without subscribers.
        steps: of the engine, which come in any case.
    """

    def __init__(
        self,
        set_recording: Callable[[bool], None],
        set_announcing: Callable[[bool], None],
    ) -> None:
        self.on_step: Callable[[StepRecord], object] = lambda _: None
        self.records = RecordFeed[Record](set_recording)
        self.live = RecordFeed[LiveRecord](set_announcing)
        self.recent = RecentSteps()
        self.steps = RecordFeed[StepRecord](lambda _: None)

    def note_sent(self, request: AddRequest) -> None:
        """Publish that a request was sent to the engine."""
        if self.live.is_wanted:
            self.live.publish([sent(request)])

    def note_begun(self, step: StepBegun) -> None:
        """Publish that the engine is about to run a step."""
        self.live.publish([step])

    def note(self, records: Iterable[EngineRecord], now_s: float) -> list[StepRecord]:
        """Publish the engine's records; return the steps among them."""
        come = [received(record, now_s) for record in records]
        steps = [record for record in come if isinstance(record, StepRecord)]
        for step in steps:
            self.on_step(step)
            self.recent.note(step)
        self.steps.publish(steps)
        self.records.publish(come)
        return steps


def sent(request: AddRequest) -> RequestSent:
    """Return the live record of a request."""
    return RequestSent(
        request_id=request.request_id,
        arrived_s=request.sent_s,
        num_prompt_tokens=len(request.prompt_token_ids),
        slo_class=request.service.slo_class,
    )
