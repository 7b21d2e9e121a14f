"""Takes requests to the scheduler, and sees to it that each has an end."""

from collections.abc import Iterable, Sequence, Set
from functools import partial

from legato.core.outputs import RequestOutput
from legato.core.request import AddRequest, Event
from legato.engine.loop.grammars import Grammars
from legato.engine.loop.recorder import Recorder
from legato.engine.loop.transfers import Transfers
from legato.scheduler.scheduler import Scheduler


class Intake:
    """Passes events to the scheduler, through grammars and transfers, which may hold them back.

    An error ends the request that it came for, unless it has ended.

    Args:
        transfers: None without other engines.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        grammars: Grammars,
        transfers: Transfers | None,
        recorder: Recorder,
    ) -> None:
        self._scheduler = scheduler
        self._containment = scheduler.containment
        self._grammars = grammars
        self._transfers = transfers
        grammars.containment = scheduler.containment
        if transfers is not None:
            transfers.containment = scheduler.containment
        self._recorder = recorder
        self._unfinished: set[str] = set()  # ids of requests that came and have not ended

    def take(self, events: Sequence[Event], now_s: float) -> list[RequestOutput]:
        """Take `events`, and what was held back until now; return the ends that follow at once."""
        value = self._containment.value
        arrived = value("the arrival of blocks", partial(self._arrived, events, now_s), ())
        ready, outputs = list[AddRequest](), list[RequestOutput]()
        if self._grammars.unfinished:
            nothing = ready, outputs
            ready, outputs = value("the look for grammars", self._grammars.take_ready, nothing)
        for event in (*arrived, *ready):
            outputs += self._pass_on([event], now_s)
        for event in events:
            outputs += self._take(event, now_s)
        if self._grammars.unfinished:
            with self._containment.containing("the record of grammars"):
                self._recorder.note_grammars(self._grammars.take_compile_s(), now_s)
        self.note(outputs, now_s)
        return outputs

    def note(self, outputs: Sequence[RequestOutput], now_s: float) -> None:
        """Note the requests that end with these outputs."""
        with self._containment.containing("the record of outputs"):
            self._recorder.note_outputs(outputs, now_s)
        for output in outputs:
            if output.finish_reason is not None:
                self._unfinished.discard(output.request_id)
                if output.request_id in self._grammars.unfinished:
                    with self._containment.containing("the end of a grammar"):
                        self._grammars.forget([output])
                if self._transfers is not None:
                    with self._containment.containing("the end of a transfer"):
                        self._transfers.note_ends([output])

    def fail(self, request_ids: Iterable[str], error: Exception) -> list[RequestOutput]:
        """End the requests that have not ended yet."""
        fail = self._scheduler.fail
        return [fail(one, error) for one in request_ids if one in self._unfinished]

    def end_lost(self, now_s: float) -> list[RequestOutput]:
        """End the requests that no part of the engine knows any more."""
        lost = self._containment.value("the look for lost requests", self._lost, ())
        outputs = self.fail(lost, RuntimeError("the request was lost"))
        self.note(outputs, now_s)
        return outputs

    def _lost(self) -> Set[str]:
        is_waiting = self._transfers is not None and self._transfers.is_waiting
        if not self._unfinished or is_waiting or self._scheduler.has_work:
            return frozenset()
        return self._unfinished - self._grammars.waiting

    def _arrived(self, events: Sequence[Event], now_s: float) -> Sequence[Event]:
        if self._transfers is None:
            return []
        with self._containment.containing("the record of transfers"):
            self._transfers.note_events(events)
            self._recorder.note_fetched(self._transfers.take_fetched())
        return self._transfers.take_arrived(now_s)

    def _take(self, event: Event, now_s: float) -> list[RequestOutput]:
        if isinstance(event, AddRequest):
            self._unfinished.add(event.request_id)
        try:
            self._recorder.note_events([event], now_s)
            if not self._grammars.unfinished and not _needs_grammar(event):
                return self._pass_on([event], now_s)
            passed, outputs = self._grammars.hold_back([event])
        except Exception as error:
            return self._failed([event], error)
        return [*outputs, *self._pass_on(passed, now_s)]

    def _pass_on(self, events: Sequence[Event], now_s: float) -> list[RequestOutput]:
        passed, outputs = events, list[RequestOutput]()
        try:
            if self._transfers is not None:
                passed, outputs = self._transfers.hold_back(events)
            return outputs + self._scheduler.apply(passed, now_s)
        except Exception as error:
            return outputs + self._failed([*events, *passed], error)

    def _failed(self, events: Sequence[Event], error: Exception) -> list[RequestOutput]:
        for event in events[:1]:
            self._containment.note(f"{type(event).__name__} of {event.request_id}", error)
        return self.fail(dict.fromkeys(event.request_id for event in events), error)


def _needs_grammar(event: Event) -> bool:
    return isinstance(event, AddRequest) and event.params.structured_outputs is not None
