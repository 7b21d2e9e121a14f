"""Runs the server from the first socket to the last stream."""

import asyncio
import contextlib
import gc
import logging
import math
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
import uvloop
from starlette.types import ASGIApp

from legato.core import signals
from legato.core.config import EngineConfig
from legato.core.errors import ConfigError
from legato.engine.errors import EngineDeadError
from legato.engine.frontend.client import EngineClient
from legato.engine.process.messages import EngineInfo
from legato.model.source import ModelSource, resolve_source
from legato.observe.metrics.server_metrics import ServerMetrics
from legato.observe.traces.spans import SpanExport, check_spans_can_be_made
from legato.observe.traces.tracer import Tracer
from legato.server.app import create_app
from legato.server.config import ServerConfig
from legato.server.http.connection import LimitedHttpProtocol
from legato.server.http.middleware import Lifecycle
from legato.server.requests.serving import Serving
from legato.server.text.text_processes import TextProcesses

logger = logging.getLogger(__name__)

# Of a connection's answer, in the kernel: enough for any line, and little enough that a client that
# does not read is noticed.
_SEND_BUFFER_BYTES = 128 * 2**10
# Files and sockets beside the connections.
_OTHER_FILES = 256
# For the last bytes to leave, once there is nothing left to compute.
_CLOSE_TIMEOUT_S = 2

Announce = Callable[[EngineInfo, str], None]


def serve(engine_config: EngineConfig, config: ServerConfig, *, on_ready: Announce) -> int:
    """Load the model and serve it until a signal comes.

    The first SIGTERM, SIGINT or SIGHUP lets running requests finish and refuses new ones; a second
    SIGTERM or SIGINT ends them with an error.

    Args:
        on_ready: called with what is served and its URL, once requests are taken.

    Returns:
        0 if every request was finished, 1 if the engine cannot be kept running or was stopped under
        one.

    Raises:
        ConfigError: the settings, the checkpoint or the address cannot be used.
    """
    if config.otlp_traces_endpoint is not None:
        check_spans_can_be_made()
    with _bind(config.host, config.port) as listener:
        _allow_connections(config.max_connections)
        # Before there is an event loop, because a download is best interrupted without one.
        source = resolve_source(engine_config.model.model, engine_config.model.revision)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_serve(source, engine_config, config, listener, on_ready))
        except asyncio.CancelledError:
            logger.info("stopped while loading")
            return 0
        except EngineDeadError as error:
            logger.error("%s", error)
            return 1


class _Server(uvicorn.Server):
    """Goes on listening while it drains, to tell new clients so, where uvicorn would hang up."""

    def __init__(
        self,
        config: uvicorn.Config,
        client: EngineClient,
        lifecycle: Lifecycle,
        on_started: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._client = client
        self._lifecycle = lifecycle
        self._on_started = on_started
        self._closing: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop; called ten times a second."""
        await super().on_tick(counter)
        return self._lifecycle.is_drained or not self._client.is_alive

    def handle_signal(self, number: int) -> None:
        """Drain at the first signal; at the second, end the engine, and every stream with it.

        But SIGHUP only drains: of one closed terminal, both the kernel and the shell may tell.
        """
        if not self._lifecycle.is_draining:
            self._lifecycle.drain()
            logger.info("draining: %d requests still run", self._lifecycle.num_in_flight)
        elif number != signal.SIGHUP and self._closing is None:
            logger.warning("stopping: %d requests end here", self._lifecycle.num_in_flight)
            self._closing = asyncio.create_task(self._client.close())


async def _serve(
    source: ModelSource,
    engine_config: EngineConfig,
    config: ServerConfig,
    listener: socket.socket,
    on_ready: Announce,
) -> int:
    loading = asyncio.current_task()
    assert loading is not None
    _on_signals(lambda _number: loading.cancel())
    async with contextlib.AsyncExitStack() as closing:
        text = TextProcesses(source, config.timeout_prompt_s)
        closing.push_async_callback(text.close)
        client = await EngineClient.start(
            engine_config,
            text.loaded(),
            served_model_name=config.served_model_name,
            timeout_s=config.timeout_engine_s,
        )
        closing.push_async_callback(client.close)
        await text.serve(
            Serving(
                info=client.info,
                max_completions=config.max_completions,
                trust_request_chat_template=config.trust_request_chat_template,
            )
        )
        for part in _begin_tracing(client, config):
            closing.push_async_callback(part.stop)
        return await _serve_until_stopped(client, text, config, listener, on_ready)


async def _serve_until_stopped(
    client: EngineClient,
    text: TextProcesses,
    config: ServerConfig,
    listener: socket.socket,
    on_ready: Announce,
) -> int:
    info = client.info
    metrics = ServerMetrics(
        info.served_model_name,
        stats=lambda: client.stats,
        num_restarts=lambda: client.num_restarts,
        cache=info.cache,
        classes=info.slo_classes,
    )
    client.on_step = metrics.steps.observe
    # As in the engine process: what was loaded need not be looked at by the collector again.
    gc.collect()
    gc.freeze()
    lifecycle = Lifecycle()
    server = _Server(
        _uvicorn_config(create_app(client, text, config, lifecycle, metrics), config, metrics),
        client,
        lifecycle,
        on_started=lambda: on_ready(client.info, _url(listener)),
    )
    _on_signals(server.handle_signal)
    await server.serve(sockets=[listener])
    return _status(client, lifecycle)


def _begin_tracing(client: EngineClient, config: ServerConfig) -> list[Tracer | SpanExport]:
    """What records from the start on.

    Raises:
        ConfigError: the trace's file cannot be written.
    """
    tracing: list[Tracer | SpanExport] = []
    if config.trace is not None:
        try:
            path, settings = Path(config.trace), client.info.settings
            tracing.append(Tracer(client.records, path, settings, config.max_trace_bytes))
        except OSError as error:
            raise ConfigError(f"cannot write the trace: {error}") from error
    if config.otlp_traces_endpoint is not None:
        name = client.info.served_model_name
        tracing.append(SpanExport(client.records, name, config.otlp_traces_endpoint))
    return tracing


def _status(client: EngineClient, lifecycle: Lifecycle) -> int:
    if client.is_alive:
        return 0
    if not lifecycle.is_draining:
        logger.error("the server ends: %s", client.death)
    return 1


def _bind(host: str, port: int) -> socket.socket:
    """Take the address before anything slow is done; until `listen`, clients are refused."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _allow_connections(max_connections: int) -> None:
    """Raise the limit of open files, as far as this process may, to hold that many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and wanted > hard:
        logger.warning("%d connections need more than the %d open files allowed", wanted, hard)
        wanted = hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _on_signals(handle: Callable[[int], object]) -> None:
    loop = asyncio.get_running_loop()
    for number in signals.ENDING:
        # `nohup` has it ignored.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, handle, number)


def _uvicorn_config(app: ASGIApp, config: ServerConfig, metrics: ServerMetrics) -> uvicorn.Config:
    # uvicorn asks for a class, which it only calls.
    protocol = partial(LimitedHttpProtocol, config, metrics.count_error)
    return uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", protocol),
        log_config=None,
        access_log=logging.getLogger("uvicorn.access").isEnabledFor(logging.INFO),
        lifespan="off",
        ws="none",
        timeout_keep_alive=math.ceil(config.timeout_keep_alive_s),
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )
