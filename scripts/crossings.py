"""Counts the files that a request crosses: `python -m scripts.crossings [--show chat]`.

One process answers four requests, without a socket, a child or a model: the application of a
server, its reader of bodies, the engine's client side, loop, scheduler and cache are the real ones,
and the executor only advances a clock. A file is crossed if one of its functions is called; records
without methods are read, not followed, and do not count. Each request is sent twice, and files are
counted the second time, when caches are warm.
"""

import argparse
import asyncio
import inspect
import json
import math
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import msgspec
from starlette.types import ASGIApp, Message

import legato
from legato.api.app import create_app
from legato.api.arrival import Arrival
from legato.api.bodies.body_model import Kind, Serving
from legato.api.config import ServerConfig
from legato.api.http import outlet
from legato.api.http.middleware import Lifecycle
from legato.api.http.outlet import AsgiOutlet
from legato.api.http_server import metrics_of
from legato.api.job import End, Part
from legato.api.readers.reader_pool import TextProcesses
from legato.api.readers.reader_process import Reading
from legato.api.reading.request_reader import RequestReader
from legato.checkpoint.source import configured_source
from legato.core.cache_config import BLOCK_SIZES, TransferConfig
from legato.core.config import DEFAULT_MODEL, ModelConfig, SchedulerConfig
from legato.core.plan import StepResult
from legato.core.request import AbortRequest, AddRequest, Event
from legato.core.stats import CacheInfo
from legato.core.step_record import StepRecord
from legato.engine.client.deliveries import Deliveries
from legato.engine.client.kv_tickets import Tickets
from legato.engine.client.settings import RunningSettings
from legato.engine.client.submissions import Submission, Submissions, Take
from legato.engine.loop.engine_loop import EngineLoop
from legato.engine.main import Arrivals
from legato.engine.process.engine_messages import EngineInfo
from legato.executor.simulated import SimulatedExecutor, VirtualClock
from legato.grammar.matcher import compile_grammar
from legato.kv.manager import KVCacheManager
from legato.language.tokenizer.loading import load_text, text_source
from legato.language.tokenizer.tokenizer import Tokenizer
from legato.observe.traces.feed import Activity
from legato.scheduler.scheduler import Scheduler
from legato.scheduler.step_time import StepTimeModel

SOURCES = Path(legato.__file__).parent
OWN_ROOMS = ("api", "language", "llm", "grammar", "engine", "scheduler")
"""The rooms that the budgets count. The others are shared by all that the engine does."""
STEP_S = 0.01
_MAX_MODEL_LEN = 4096
_NUM_BLOCKS = 1024
_WORD = 260
"""A token of the default model with letters alone."""

_MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": 8}),
    "chat with schema and tool": (
        "/v1/chat/completions",
        {
            "messages": _MESSAGES,
            "max_tokens": 8,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "weather", "schema": _PARAMETERS},
            },
            "tools": [
                {"type": "function", "function": {"name": "look", "parameters": _PARAMETERS}}
            ],
        },
    ),
    "responses": ("/v1/responses", {"input": "What is the weather?", "max_output_tokens": 16}),
    "messages": ("/v1/messages", {"messages": _MESSAGES, "max_tokens": 8}),
}
"""Key the request's name; value its path and body. All are streamed."""


@dataclass
class Crossing:
    """What one request crosses.

    Attributes:
        calls: functions in the order of their first calls, as path and qualified name.
        num_compiled: grammars that were compiled the first time.
    """

    calls: list[tuple[str, str]] = field(default_factory=list)
    num_compiled: int = 0

    @property
    def files(self) -> list[str]:
        """Paths below the package, sorted."""
        return sorted({path for path, _ in self.calls})

    @property
    def own_files(self) -> list[str]:
        """Those of the rooms in `OWN_ROOMS`."""
        return [path for path in self.files if path.split("/")[0] in OWN_ROOMS]


def crossings() -> dict[str, Crossing]:
    """Send all requests; key the request's name."""
    return asyncio.run(_crossings())


async def _crossings() -> dict[str, Crossing]:
    watch = _Watch()
    # Profiled code is slow: without this, some answers would be cut into slices of a millisecond.
    with patch.object(outlet, "_SLICE_S", math.inf), watch.calls():
        app = _application()
        found: dict[str, Crossing] = {}
        for name, (path, body) in REQUESTS.items():
            watch.begin()
            await _send(app, path, body)
            num_compiled = watch.num_compiled
            watch.begin()
            await _send(app, path, body)
            found[name] = Crossing(watch.seen, num_compiled)
    return found


class _Watch:
    """Sees calls of the package's functions, in threads that start while it looks, too."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was called."""
        self.seen: list[tuple[str, str]] = []
        self.num_compiled = 0
        self._codes = set[CodeType]()

    @contextmanager
    def calls(self) -> Iterator[None]:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call":
            return
        self.num_compiled += code is compile_grammar.__code__
        if code in self._codes:
            return
        self._codes.add(code)
        path = _path(code.co_filename)
        # Bodies of modules and classes are called, too, when they are made.
        if path is not None and code.co_flags & inspect.CO_OPTIMIZED:
            self.seen.append((path, code.co_qualname))


def _application() -> ASGIApp:
    model = ModelConfig(model=DEFAULT_MODEL)
    tokenizer, defaults = load_text(text_source(model, configured_source(model)))
    scheduler = SchedulerConfig(itl_slo_s=0.1)
    block_size = BLOCK_SIZES["cpu"]
    info = EngineInfo(
        model=DEFAULT_MODEL,
        served_model_names=(DEFAULT_MODEL,),
        max_model_len=_MAX_MODEL_LEN,
        vocab_size=tokenizer.vocabulary.num_ids,
        cache=CacheInfo(
            num_blocks=_NUM_BLOCKS, block_size=block_size, dtype="none", enable_prefix_caching=True
        ),
        scheduler=scheduler.resolve(_MAX_MODEL_LEN),
        settings={},
    )
    config = ServerConfig()
    serving = Serving.of(info, config)
    engine: Any = _Engine(info, scheduler, tokenizer, defaults)
    text = _Text(RequestReader(tokenizer, defaults, serving))
    return create_app(engine, text, config, Lifecycle(), metrics_of(engine, text, config))


class _Text(TextProcesses):
    """Reads bodies at once, in this process."""

    problem = ""

    def __init__(self, reader: RequestReader) -> None:
        self._requests = reader
        self.num_stuck = Counter[str](reader=0, zygote=0)

    async def read(
        self, kind: Kind, body: bytearray, arrival: Arrival, stored: bytes | None = None
    ) -> Reading:
        del arrival  # only its warnings matter, and there are none
        *parts, end = self._requests.read(kind, bytes(body), stored)
        assert isinstance(end, End)
        return [part for part in parts if isinstance(part, Part)], end


class _Engine:
    """The client side of an engine and its loop, in one process; see `Engine`."""

    def __init__(
        self, info: EngineInfo, scheduler: SchedulerConfig, tokenizer: Tokenizer, defaults: Any
    ) -> None:
        self.info = info
        self.vocabulary = tokenizer.vocabulary
        self.defaults = defaults
        self.tickets = Tickets(TransferConfig(), None)
        self.activity = Activity(lambda _: None, lambda _: None)
        self.settings = RunningSettings(scheduler, info)
        self.replicas: dict[str, Any] = {}
        self.num_restarts = self.num_stuck = 0
        self._loop = _engine_loop(info)
        self._loop.grammars.set_vocabulary(tokenizer.vocabulary)
        self._loop.set_recording(is_on=True)
        self.stats = self._loop.stats
        self._arrivals = Arrivals(self._loop)
        self._events: list[Event] = []
        self._running: asyncio.Task[None] | None = None
        self._deliveries = Deliveries(scheduler.classes, self._loop.record_delivery)
        self._submissions = Submissions(
            check_running=lambda: None,
            send=self._send,
            abort=lambda request_id: self._put(AbortRequest(request_id=request_id)),
        )

    def kept(self) -> Any:
        return self._deliveries.kept()

    def submitted(
        self, requests: Iterable[AddRequest], take: Take
    ) -> AbstractAsyncContextManager[Submission]:
        return self._submissions.submitted(requests, take)

    def _send(self, request: AddRequest) -> None:
        self._put(request)
        self.activity.note_sent(request)

    def _put(self, event: Event) -> None:
        self._events.append(event)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._events or self._arrivals or self._loop.has_work or len(self._submissions):
            await asyncio.sleep(0)  # clients come in between, as beside an engine's process
            events, self._events = self._events, []
            _, outputs = self._arrivals.take(events)
            outputs += self._loop.step()
            self.stats = self._loop.stats
            records = self._loop.take_records()
            now_s = self._loop_now_s()
            steps = self.activity.note(records, now_s)
            given = self._submissions.take(outputs, now_s)
            self._deliver(steps, given)

    def _deliver(self, steps: list[StepRecord], given: Any) -> None:
        now_s = self._loop_now_s()
        self._submissions.note(given, lambda stream: self._deliveries.note(stream, now_s))
        for step in steps:
            self._deliveries.end_step(step.ended_s, now_s, is_mixed=False)

    @staticmethod
    def _loop_now_s() -> float:
        return asyncio.get_running_loop().time()


class _Executor(SimulatedExecutor):
    """Samples the same word in every run: a request's way depends on the text that comes."""

    def collect(self) -> StepResult:
        result = super().collect()
        chunks = {
            request_id: msgspec.structs.replace(
                chunk, token_ids=tuple(_WORD for _ in chunk.token_ids)
            )
            for request_id, chunk in result.chunks.items()
        }
        return msgspec.structs.replace(result, chunks=chunks)


def _engine_loop(info: EngineInfo) -> EngineLoop:
    kv = KVCacheManager(_NUM_BLOCKS, info.cache.block_size, enable_prefix_caching=True)
    clock = VirtualClock()
    scheduler = Scheduler(
        info.scheduler, max_model_len=_MAX_MODEL_LEN, kv=kv, step_time=StepTimeModel()
    )
    executor = _Executor(clock, lambda _: STEP_S, vocab_size=info.vocab_size)
    return EngineLoop(scheduler, kv, executor)


async def _send(app: ASGIApp, path: str, body: dict[str, Any]) -> None:
    data = json.dumps(body | {"model": DEFAULT_MODEL, "stream": True}).encode()
    unread: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        return unread.pop() if unread else await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Message) -> None:
        sent.append(message)

    outlet = AsgiOutlet(send)
    headers = {"host": "localhost", "content-type": "application/json"}
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            *((name.encode(), value.encode()) for name, value in headers.items()),
            (b"content-length", str(len(data)).encode()),
        ],
        "client": ("127.0.0.1", 1),
        "server": ("localhost", 8000),
        "state": {"received_s": 0.0},
    }
    outlet.put_into(scope)
    await app(scope, receive, outlet.send)
    answer = b"".join(message.get("body", b"") for message in sent)
    assert sent[0]["status"] == 200, answer
    assert b"data: " in answer, answer


@cache
def _path(filename: str) -> str | None:
    path = Path(filename)
    return path.relative_to(SOURCES).as_posix() if path.is_relative_to(SOURCES) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--show", choices=REQUESTS, help="print this request's calls in order")
    flags = parser.parse_args()
    for name, crossing in crossings().items():
        if flags.show is None:
            rooms = Counter(path.split("/")[0] for path in crossing.files)
            print(
                f"{name}: {len(crossing.files)} files, {len(crossing.own_files)} in own rooms, "
                f"{crossing.num_compiled} grammars compiled"
            )
            print("   ", ", ".join(f"{room} {count}" for room, count in rooms.items()))
        elif name == flags.show:
            print("\n".join(f"{path}:{function}" for path, function in crossing.calls))


if __name__ == "__main__":
    main()
