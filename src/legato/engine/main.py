"""The engine process: `python -m legato.engine.main FD`, started by `EngineProcess`.

It is separate from the HTTP server for two reasons: parsing and tokenizing requests never delays a
step by the interpreter lock, and the engine can die and be started again.
"""

import gc
import math
import socket
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from legato.core.config import EngineConfig
from legato.core.garbage import uncollected
from legato.core.kv_events import KVEvent
from legato.core.logs import follow_logging
from legato.core.outputs import RequestOutput
from legato.core.request import AbortRequest, AddRequest, Event
from legato.core.signals import leave_to_parent
from legato.core.stats import EngineStats
from legato.core.step_record import StepBegun
from legato.engine.build.start_timer import StartTimer
from legato.engine.errors import EngineFaultError
from legato.engine.process.channel import Channel, ChannelClosedError, Ping, Pong, pack_frame
from legato.engine.process.engine_messages import (
    Control,
    EngineFailed,
    EngineInfo,
    EngineReady,
    ForgetCache,
    GetState,
    LongStepBegins,
    Reconfigure,
    SetAnnouncing,
    SetRecording,
    SetVocabulary,
    StartPartEnded,
    StateReport,
    StepAnnounced,
    StepDelivered,
    StepOutputs,
    Taken,
    WatchCache,
)

if TYPE_CHECKING:
    from legato.engine.loop.engine_loop import EngineLoop

_YOUNG_PER_FULL_COLLECTION = 10_000
_TAKING_S = 0.005
"""Longest time between two steps in which another request is taken. One takes up to 2 ms where load
is shed, since its first token is forecast."""

FromFrontEnd = EngineConfig | AddRequest | AbortRequest | Control


Build = Callable[[EngineConfig], "tuple[EngineLoop, EngineInfo]"]


class Arrivals:
    """Requests that an engine was sent and has not taken, in the order in which they came."""

    def __init__(self, engine: "EngineLoop", clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._requests: dict[str, AddRequest] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def take(self, events: Iterable[Event]) -> tuple[int, list[RequestOutput]]:
        """Apply all other events, and as many requests as steps may wait for; an idle engine's all.

        Returns:
            the number of requests that were taken, and the ends that are known without a step.
        """
        num_taken, outputs = 0, list[RequestOutput]()
        longest_s = _TAKING_S if self._engine.has_work else math.inf
        for event in events:
            if isinstance(event, AddRequest):
                self._requests[event.request_id] = event
                continue
            arriving = self._requests.pop(event.request_id, None)
            outputs += self._engine.apply([event] if arriving is None else [arriving, event])
            num_taken += arriving is not None
        ends_s = self._clock() + longest_s
        while self._requests and (not num_taken or self._clock() < ends_s):
            outputs += self._engine.apply([self._requests.pop(next(iter(self._requests)))])
            num_taken += 1
        return num_taken, outputs


def main(fd: int, build: Build | None = None) -> int:
    """Run an engine until the socket closes. Args: build: makes the engine; None for a model's."""
    leave_to_parent()
    follow_logging()
    channel = Channel(socket.socket(fileno=fd), FromFrontEnd)
    try:
        return _serve(channel, build)
    except ChannelClosedError:
        return 0


def _serve(channel: Channel, build: Build | None = None) -> int:
    config, *early = channel.receive(wait_s=None)
    assert isinstance(config, EngineConfig)
    assert not early, "requests come after the engine is ready"
    try:
        timer = StartTimer(lambda name, seconds: channel.send(StartPartEnded(name, seconds)))
        with uncollected():
            make = build or _model_builder(timer)
            timer.end("imports")
            engine, info = make(config)
        info = msgspec.structs.replace(info, start_s=timer.seconds | info.start_s)
    except ChannelClosedError:
        raise
    except Exception as error:
        failure = EngineFailed.at_start(error)
        channel.send(failure)
        return 2 if failure.is_user_error else 1
    # A full collection looks at every cached block for milliseconds, and finds nothing: the garbage
    # of steps is young.
    gc.set_threshold(*gc.get_threshold()[:2], _YOUNG_PER_FULL_COLLECTION)
    channel.send(EngineReady(info))
    try:
        return _run(engine, channel)
    finally:
        engine.close()


def _run(engine: "EngineLoop", channel: Channel) -> int:
    arrivals = Arrivals(engine)
    engine.note_long_step = lambda predicted_s: channel.send(LongStepBegins(predicted_s))
    while True:
        messages = channel.receive(wait_s=0.0 if arrivals else engine.idle_s)
        if Ping() in messages:
            channel.send(Pong())
            messages = [message for message in messages if message != Ping()]
        if GetState() in messages:
            frame = engine.containment.value(
                "the report of the state", lambda: pack_frame(StateReport(engine.state)), None
            )
            channel.send_frame(frame or pack_frame(StateReport(None)))
            messages = [message for message in messages if message != GetState()]
        if not (messages or arrivals or engine.has_work):
            engine.use_idle_time()
            continue
        num_taken, outputs = arrivals.take(_events(messages, engine, channel))
        if num_taken:
            channel.send(Taken(num_taken))  # before the step: more requests come during it
        try:
            outputs += engine.step()
        except EngineFaultError as error:
            channel.send(EngineFailed(str(error), is_user_error=False))
            return 1
        _deliver(outputs, engine, channel)


def _deliver(outputs: list[RequestOutput], engine: "EngineLoop", channel: Channel) -> None:
    """Send the outputs of a step; end a request whose output cannot be packed.

    Then the step's records are left out, and events and statistics as well if these cannot be
    packed.
    """
    records, kv_events = engine.take_records(), engine.take_kv_events()
    try:
        frame = pack_frame(StepOutputs(outputs, engine.stats, records, kv_events))
    except Exception as error:
        packable = [_packable(output, engine) for output in outputs]
        if packable == outputs:
            engine.containment.note("the report of a step", error)
        outputs = packable
        pack = partial(_pack_some, outputs, engine, kv_events)
        frame = engine.containment.value("the report of events", pack, b"")
        pack = partial(_pack_some, outputs, engine, [])
        frame = frame or engine.containment.value("the report of statistics", pack, b"")
    channel.send_frame(frame or pack_frame(StepOutputs(outputs, EngineStats())))


def _pack_some(
    outputs: list[RequestOutput], engine: "EngineLoop", kv_events: list[KVEvent]
) -> bytes:
    return pack_frame(StepOutputs(outputs, engine.stats, kv_events=kv_events))


def _packable(output: RequestOutput, engine: "EngineLoop") -> RequestOutput:
    try:
        pack_frame(output)
    except Exception as error:
        return engine.fail(output.request_id, error)
    return output


def _model_builder(timer: StartTimer) -> Build:
    from legato.engine.build.builder import build_engine

    return partial(build_engine, timer=timer)


def _events(
    messages: Iterable[FromFrontEnd], engine: "EngineLoop", channel: Channel
) -> list[Event]:
    """Act on the control messages, and return the scheduler's events."""
    events: list[Event] = []
    for message in messages:
        if isinstance(message, AddRequest | AbortRequest):
            events.append(message)
            continue
        with engine.containment.containing(type(message).__name__):
            _control(message, engine, channel)
    return events


def _control(message: FromFrontEnd, engine: "EngineLoop", channel: Channel) -> None:
    match message:
        case SetRecording(is_on):
            engine.set_recording(is_on=is_on)
        case SetAnnouncing(is_on):
            engine.announce_steps(_announcing(channel) if is_on else None)
        case Reconfigure(scheduler):
            engine.reconfigure(scheduler)
        case ForgetCache():
            engine.forget_cache()
        case StepDelivered(delay_change_s):
            engine.record_delivery(delay_change_s)
        case WatchCache():
            engine.watch_cache()
        case SetVocabulary(vocabulary):
            engine.grammars.set_vocabulary(vocabulary)
            engine.grammars.prepare()  # now, while there are no streams to delay


def _announcing(channel: Channel) -> Callable[[StepBegun], None]:
    return lambda step: channel.send(StepAnnounced(step))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
