"""Runs the HTTP server: it refuses requests while the model loads, and serves until it is drained.

It is apart from `run.py` so that its imports are made while other processes load.
"""

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import cast

import psutil
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from legato.api.app import create_app
from legato.api.config import ServerConfig
from legato.api.context import KVEventSource
from legato.api.http.bodies import json_response
from legato.api.http.connection import LimitedHttpProtocol
from legato.api.http.error_responses import error_response
from legato.api.http.errors import still_loading
from legato.api.http.middleware import OPEN_PATHS, AddVersion, Lifecycle, RequestIds
from legato.api.http.outlet import Turns
from legato.api.operations.probes import Live, Startup
from legato.api.readers.reader_pool import TextProcesses
from legato.core import signals
from legato.core.config_fields import written
from legato.core.errors import ConfigError
from legato.engine.client.client import EngineClient
from legato.engine.client.engine import Engine
from legato.engine.process.engine_messages import EngineInfo
from legato.observe.metrics.server_metrics import ServerMetrics
from legato.observe.traces.spans import SpanExport
from legato.observe.traces.tracer import Tracer

logger = logging.getLogger(__name__)

# Time to send the last bytes, once all answers are computed.
_CLOSE_TIMEOUT_S = 2

_PROBES = OPEN_PATHS | {"/load"}
"""Supervisors and Prometheus ask every few seconds: no access to these paths is logged."""

Announce = Callable[[EngineInfo, str], None]


class LoadingApp:
    """Answers while the model loads: the probes, and 503 for all else.

    Args:
        parts_s: as of `Startup`; the parts are added to it as they end.
    """

    def __init__(self, parts_s: Mapping[str, float]) -> None:
        self._parts_s = parts_s
        self._begun_s = psutil.Process().create_time()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["path"]:
            case "/livez":
                answer = json_response(Live())
            case "/startupz":
                elapsed_s = round(time.time() - self._begun_s, 3)
                answer = json_response(Startup("loading", elapsed_s, dict(self._parts_s)))
                answer.status_code = HTTPStatus.SERVICE_UNAVAILABLE
            case _:
                answer = error_response(still_loading())
        await answer(scope, receive, send)


class ListeningServer:
    """The server on its socket: first with a `LoadingApp`, then with the model's application.

    Args:
        listener: a bound socket.
        parts_s: as of `LoadingApp`.

    Raises:
        ConfigError: another socket that was bound at the same time listens already.
    """

    def __init__(
        self, config: ServerConfig, listener: socket.socket, parts_s: Mapping[str, float]
    ) -> None:
        try:
            listener.listen()
        except OSError as error:
            where = f"{config.host}:{config.port}"
            raise ConfigError(f"cannot listen on {where}: {error.strerror}") from error
        self._config = config
        self._listener = listener
        self._metrics: ServerMetrics | None = None
        app = LoadingApp(parts_s)
        self._app: ASGIApp = AddVersion(RequestIds(app, self.count_error))
        self._server = _Server(_uvicorn_config(self._answer, config, self.count_error))
        self._running = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def serve(self, engine: Engine, text: TextProcesses, on_ready: Announce) -> int:
        """Serve a model until a signal comes or the engine is gone; returns the exit status."""
        config = self._config
        metrics = metrics_of(engine, text, config)
        # As in the engine process: keep the garbage collector away from what was loaded.
        gc.freeze()
        lifecycle = Lifecycle()
        async with contextlib.AsyncExitStack() as closing:
            source = _tell_of_cache(engine, config, closing)
            app = create_app(engine, text, config, lifecycle, metrics, source)
            ending = _Ending(engine, lifecycle, config.timeout_drain_s)
            signals.call_when_ending(ending.handle_signal)
            for part in begin_tracing(engine, config):
                closing.push_async_callback(part.stop)
            self._app, self._metrics = app, metrics
            self._server.ending = ending
            if not self._running.done():
                on_ready(engine.info, _url(self._listener))
            await self._running
        return _status(engine, lifecycle)

    async def stop(self) -> None:
        """End the server, if it still runs, and close its connections."""
        self._server.should_exit = True
        await asyncio.wait([self._running])

    def count_error(self, status: int) -> None:
        """Count an error answer, once there are metrics."""
        if self._metrics is not None:
            self._metrics.count_error(status)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def metrics_of(engine: Engine, text: TextProcesses, config: ServerConfig) -> ServerMetrics:
    """Make the metrics of this engine's server, and observe its steps from now on."""
    info = engine.info
    metrics = ServerMetrics(
        info.served_model_name,
        stats=partial(getattr, engine, "stats"),
        num_restarts=partial(getattr, engine, "num_restarts"),
        num_stuck=lambda: {"engine": engine.num_stuck, **text.num_stuck},
        cache=info.cache,
        classes=info.slo_classes,
        kept=engine.kept,
        replicas=partial(getattr, engine, "replicas"),
        pids=lambda: {"server": os.getpid(), **engine.pids},  # of no engine while it restarts
        prefix=config.metrics_prefix,
    )
    engine.activity.on_step = metrics.steps.observe
    engine.settings.watch(lambda now: metrics.slos.promise(now.asked.classes))
    return metrics


def _tell_of_cache(
    engine: Engine, config: ServerConfig, closing: contextlib.AsyncExitStack
) -> KVEventSource | None:
    """Publish cache events until the server ends, if configured; return where.

    Raises:
        ConfigError: an endpoint cannot be used.
    """
    if config.kv_events_endpoint is None:
        return None
    assert isinstance(engine, EngineClient), "of several engines, none is told of"
    # Local import: ZeroMQ may not be installed.
    from legato.observe.cache_publisher import CachePublisher

    topic = config.kv_events_topic
    publisher = CachePublisher(config.kv_events_endpoint, config.kv_events_replay_endpoint, topic)
    closing.callback(publisher.close)
    engine.watch_cache(publisher.publish)
    return KVEventSource(
        endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint, topic=topic
    )


def begin_tracing(engine: Engine, config: ServerConfig) -> list[Tracer | SpanExport]:
    """Start the trace and the span export that the configuration asks for.

    Raises:
        ConfigError: the trace's file cannot be written.
    """
    tracing: list[Tracer | SpanExport] = []
    if config.trace is not None:
        try:
            tracing.append(
                Tracer(
                    engine.activity.records,
                    Path(config.trace),
                    engine.info.settings,
                    config.max_trace_bytes,
                    engine.settings.replay_basis,
                )
            )
        except OSError as error:
            raise ConfigError(f"cannot write the trace: {error}") from error
    if config.otlp_traces_endpoint is not None:
        name = engine.info.served_model_name
        tracing.append(SpanExport(engine.activity.records, name, config.otlp_traces_endpoint))
    return tracing


def _status(engine: Engine, lifecycle: Lifecycle) -> int:
    if engine.is_alive:
        return 0
    if not lifecycle.is_draining:
        logger.error("the server ends: %s", engine.death)
    return 1


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Keeps listening while it drains, to refuse new clients; uvicorn would close the socket.

    Attributes:
        ending: says when the model's server ends; None while the model loads.
    """

    ending: "_Ending | None" = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop; called ten times a second."""
        is_stopped = await super().on_tick(counter)
        return is_stopped if self.ending is None else self.ending.is_over


class _Ending:
    """Ends a server at signals: the first drains it. Args: timeout_drain_s: None for no limit."""

    def __init__(self, engine: Engine, lifecycle: Lifecycle, timeout_drain_s: float | None) -> None:
        self._engine = engine
        self._lifecycle = lifecycle
        self._timeout_drain_s = timeout_drain_s
        self._closing: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether no request runs any more, or no engine is left to run one."""
        return self._lifecycle.is_drained or not self._engine.is_alive

    def handle_signal(self, number: int) -> None:
        """Drain at the first signal; at the second, end the engine and every stream.

        SIGHUP only drains: one closed terminal may cause two, from the kernel and the shell.
        """
        if not self._lifecycle.is_draining:
            self._drain()
        elif number != signal.SIGHUP:
            self._stop()

    def _drain(self) -> None:
        self._lifecycle.drain()
        bound = ""
        if self._timeout_drain_s is not None:
            asyncio.get_running_loop().call_later(self._timeout_drain_s, self._stop)
            bound = f", for {written('duration', self._timeout_drain_s)} at most"
        logger.info(
            "draining: %d requests still run%s; another Ctrl-C, or SIGTERM, ends them at once",
            self._lifecycle.num_in_flight,
            bound,
        )

    def _stop(self) -> None:
        if self._closing is None:
            logger.warning("stopping: %d requests end here", self._lifecycle.num_in_flight)
            self._closing = asyncio.create_task(self._engine.close(at_once=True))


def _worth_a_line(record: logging.LogRecord) -> bool:
    """Leave out probes, and remove the query of a logged path: clients may put keys there."""
    if isinstance(record.args, tuple):
        if any(str(part).partition("?")[0] in _PROBES for part in record.args):
            return False
        record.args = tuple(
            part.partition("?")[0] if isinstance(part, str) else part for part in record.args
        )
    return True


def _uvicorn_config(
    app: ASGIApp, config: ServerConfig, count_error: Callable[[int], None]
) -> uvicorn.Config:
    # uvicorn wants a class, but only calls it.
    protocol = partial(LimitedHttpProtocol, config, Turns(), count_error)
    access_logger = logging.getLogger("uvicorn.access")
    access_logger.addFilter(_worth_a_line)
    return uvicorn.Config(
        app,
        interface="asgi3",  # uvicorn takes a method for an older interface
        http=cast("type[asyncio.Protocol]", protocol),
        log_config=None,
        access_log=access_logger.isEnabledFor(logging.INFO),
        lifespan="off",
        ws="none",
        timeout_keep_alive=math.ceil(config.timeout_keep_alive_s),
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )
