"""One engine in the caller's process, for calls from several threads at once."""

import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from legato.core.outputs import RequestOutput
from legato.core.request import AbortRequest, AddRequest, Event
from legato.engine.loop.engine_loop import EngineLoop


class Inbox:
    """The outputs of one call's requests that the call has not taken yet."""

    def __init__(self) -> None:
        self.outputs: deque[RequestOutput] = deque()
        self.fault: Exception | None = None


class SharedEngine:
    """Steps an engine for whichever call waits; all calls' requests share the steps.

    An engine is stepped by one thread at a time. The thread hands the step's outputs to the calls
    that they belong to, so that no call waits for the end of another one.
    """

    def __init__(self, engine: EngineLoop) -> None:
        self._engine = engine
        self._turn = threading.Condition()
        """Guards all below; notified after each step."""
        self._inboxes: dict[str, Inbox] = {}  # key request id
        self._events: list[Event] = []
        self._is_stepping = False

    def submit(self, requests: Sequence[AddRequest]) -> Inbox:
        """Begin a call; the next step takes its requests."""
        inbox = Inbox()
        with self._turn:
            self._inboxes |= {request.request_id: inbox for request in requests}
            self._events += requests
        return inbox

    def take(self, inbox: Inbox) -> list[RequestOutput]:
        """Return outputs of a call, after a step by this thread or another one; maybe none.

        Raises:
            EngineFaultError: the engine failed in a step of any call.
        """
        with self._turn:
            while self._is_stepping and not (inbox.outputs or inbox.fault):
                self._turn.wait()
            is_ours = not (inbox.outputs or inbox.fault)
            if is_ours:
                self._is_stepping = True
                events, self._events = self._events, []
        if is_ours:
            with _interrupts_delayed():
                self._step(events)
        with self._turn:
            if inbox.fault is not None:
                raise inbox.fault
            outputs = list(inbox.outputs)
            inbox.outputs.clear()
        return outputs

    def abort(self, request_id: str) -> None:
        """Stop a request before the next step."""
        with self._turn:
            self._events.append(AbortRequest(request_id=request_id))

    def end(self, requests: Sequence[AddRequest], unfinished: Iterable[str]) -> None:
        """End a call. Args: unfinished: ids of its requests that still run."""
        with self._turn:
            for request in requests:
                self._inboxes.pop(request.request_id, None)
            self._events += [AbortRequest(request_id=request_id) for request_id in unfinished]
            if not self._is_stepping:
                self._apply()

    def _step(self, events: Sequence[Event]) -> None:
        outputs: list[RequestOutput] = []
        fault: Exception | None = None
        try:
            outputs = self._engine.step(events)
        except Exception as error:  # raised by each call, since requests of all may be lost
            fault = error
        finally:
            with self._turn:
                self._is_stepping = False
                self._turn.notify_all()  # first, for what follows may raise
                self._hand_out(outputs)
                if fault is not None:
                    for inbox in self._inboxes.values():
                        inbox.fault = fault
                self._apply()

    def _apply(self) -> None:
        """Apply events that came during a step: there may be no further step."""
        events, self._events = self._events, []
        if events:
            self._hand_out(self._engine.apply(events))

    def _hand_out(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:  # else the call has ended
                inbox.outputs.append(output)


@contextmanager
def _interrupts_delayed() -> Iterator[None]:
    """Delay a first Ctrl-C to the end of a step: an engine cannot go on from the midst of one."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        if came:  # the step may be stuck
            usual(number, frame)
        came.append((number, frame))

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if came:
            usual(*came[0])
