"""What an engine does, for those who watch it: metrics, the dashboard, traces."""

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
from legato.observe.traces.feed import RecordFeed
from legato.observe.traces.recent_steps import RecentSteps


class Activity:
    """Where what an engine tells of itself comes together.

    Args:
        set_recording, set_announcing: told whether anybody wants `records`, and `live`.

    Attributes:
        on_step: told of each step.
        records: of what the engine does; made while somebody has subscribed.
        live: what is told before it is over; likewise.
        recent: the latest steps, whether anybody has subscribed or not.
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

    def note_sent(self, request: AddRequest) -> None:
        """The engine has been sent a request."""
        if self.live.is_wanted:
            self.live.publish([sent(request)])

    def note_begun(self, step: StepBegun) -> None:
        """The engine is about to run a step."""
        self.live.publish([step])

    def note(self, records: Iterable[EngineRecord], now_s: float) -> list[StepRecord]:
        """The engine has told of what it did; returns the steps among that."""
        come = [received(record, now_s) for record in records]
        steps = [record for record in come if isinstance(record, StepRecord)]
        for step in steps:
            self.on_step(step)
            self.recent.note(step)
        self.records.publish(come)
        return steps


def sent(request: AddRequest) -> RequestSent:
    """What those who watch are told of a request."""
    return RequestSent(
        request_id=request.request_id,
        arrived_s=request.sent_s,
        num_prompt_tokens=len(request.prompt_token_ids),
        slo_class=request.service.slo_class,
    )
