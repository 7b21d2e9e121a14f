"""Starts the server and its processes, and serves once they have loaded."""

import asyncio
import contextlib
import logging
import resource
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import uvloop

from legato.api.bodies.body_model import Serving
from legato.api.config import ServerConfig
from legato.api.download import Found, download, find, may_download
from legato.api.readers.reader_pool import TextProcesses
from legato.checkpoint.defaults import ModelDefaults
from legato.core import signals
from legato.core.cache_config import CacheConfig
from legato.core.config import EngineConfig, ModelConfig
from legato.core.errors import ConfigError
from legato.core.garbage import uncollected
from legato.core.version import install_command
from legato.core.vocabulary import Vocabulary
from legato.engine.client.client import EngineClient
from legato.engine.client.engine import Engine
from legato.engine.errors import EngineDeadError
from legato.engine.process.engine_messages import EngineInfo
from legato.observe.traces.spans import check_spans_can_be_made

if TYPE_CHECKING:
    from legato.api.http_server import ListeningServer

logger = logging.getLogger(__name__)

# The kernel's buffer of a connection: enough for any line, and small enough that a client that does
# not read is noticed.
_SEND_BUFFER_BYTES = 128 * 2**10
# Open files and sockets beside the connections, at most half of all: of processes, of files that
# are read, and of clients that are being refused.
_OTHER_FILES = 256
T = TypeVar("T")
Announce = Callable[[EngineInfo, str], None]
StartEngine = Callable[[Awaitable[tuple[Vocabulary, ModelDefaults]]], Awaitable[Engine]]
"""Starts an engine and waits until it serves; called with the text, as `EngineClient.start` is."""


def serve(
    engine_config: EngineConfig,
    config: ServerConfig,
    *,
    on_ready: Announce,
    start_engine: StartEngine | None = None,
) -> int:
    """Load the model and serve it until a signal comes.

    The first SIGTERM, SIGINT or SIGHUP lets running requests finish and refuses new ones; a second
    SIGTERM or SIGINT ends them with an error.

    Args:
        on_ready: called with the engine's information and the server's URL, once it accepts
            requests.
        start_engine: None starts a process beside the server.

    Returns:
        0 if every request was finished, 1 if the engine cannot be kept running or was stopped under
        one.

    Raises:
        ConfigError: the settings, the checkpoint or the address cannot be used.
    """
    with _listener(engine_config, config) as listener:
        config = _with_room(config)
        model = engine_config.model
        found = None if may_download(model) else find(model)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                parts_s: dict[str, float] = {}
                start = start_engine or partial(_start_engine, engine_config, config, parts_s)
                return runner.run(_serve(model, found, start, config, listener, parts_s, on_ready))
        except asyncio.CancelledError:
            logger.info("stopped while loading")
            return 0
        except EngineDeadError as error:
            logger.error("%s", error)
            return 1


def check_server(engine_config: EngineConfig, config: ServerConfig) -> None:
    """Check what a server needs beside its engine; raises `ConfigError` as `serve`."""
    _listener(engine_config, config).close()


def _listener(engine_config: EngineConfig, config: ServerConfig) -> socket.socket:
    """Return a socket at the configured address; raises `ConfigError` as `serve`."""
    if config.otlp_traces_endpoint is not None:
        check_spans_can_be_made()
    if config.kv_events_endpoint is not None:
        _check_cache_can_be_told(engine_config.cache)
    return _bind(config.host, config.port)


def _check_cache_can_be_told(cache: CacheConfig) -> None:
    if find_spec("zmq") is None:
        raise ConfigError(f"ZeroMQ missing: {install_command('events')}")
    if not cache.enable_prefix_caching:
        raise ConfigError("kv_events_endpoint tells of the prefix cache, which is turned off")


async def _serve(
    model: ModelConfig,
    found: Found | None,
    start_engine: StartEngine,
    config: ServerConfig,
    listener: socket.socket,
    parts_s: dict[str, float],
    on_ready: Announce,
) -> int:
    loading = asyncio.current_task()
    assert loading is not None
    signals.call_when_ending(lambda _number: loading.cancel())
    async with contextlib.AsyncExitStack() as closing:
        listening = None
        if found is None:
            listening = _listen(config, listener, parts_s, closing)
            found = await _started(_downloaded(model, parts_s), listening)
        if found.passed_over:
            names = ", ".join(found.passed_over)
            logger.info("the safetensors files of %s are read, not %s", found.text.model, names)
        text = TextProcesses(found.text, config.timeout_prompt_s)
        closing.push_async_callback(text.close)
        loaded = asyncio.create_task(text.loaded())
        listening = listening or _listen(config, listener, parts_s, closing, behind=loaded)
        engine = await _started(start_engine(loaded), listening)
        closing.push_async_callback(engine.close)
        await text.serve(Serving.of(engine.info, config))
        return await (await listening).serve(engine, text, on_ready)


async def _downloaded(model: ModelConfig, parts_s: dict[str, float]) -> Found:
    started_s = time.perf_counter()
    found = await download(model)
    parts_s["download"] = round(time.perf_counter() - started_s, 3)
    return found


async def _start_engine(
    engine_config: EngineConfig,
    config: ServerConfig,
    parts_s: dict[str, float],
    text: Awaitable[tuple[Vocabulary, ModelDefaults]],
) -> Engine:
    return await EngineClient.start(
        engine_config,
        text,
        served_model_names=config.served_model_names,
        timeout_s=config.timeout_engine_s,
        on_part=parts_s.__setitem__,
    )


async def _started(starting: Awaitable[T], listening: asyncio.Task[Any]) -> T:
    """Wait for a part, and for the server to listen; raises at once if it cannot."""
    part = asyncio.ensure_future(starting)
    try:
        await asyncio.wait([part, listening], return_when=asyncio.FIRST_EXCEPTION)
        if listening.done():
            listening.result()
        return await part
    finally:
        if not part.done():
            part.cancel()
            await asyncio.wait([part])


def _listen(
    config: ServerConfig,
    listener: socket.socket,
    parts_s: Mapping[str, float],
    closing: contextlib.AsyncExitStack,
    *,
    behind: asyncio.Task[Any] | None = None,
) -> "asyncio.Task[ListeningServer]":
    """Begin to listen, once `behind` is done, until `closing` ends."""
    listening = asyncio.create_task(_listening(config, listener, parts_s, behind))
    closing.push_async_callback(_stop, listening)
    return listening


async def _listening(
    config: ServerConfig,
    listener: socket.socket,
    parts_s: Mapping[str, float],
    behind: asyncio.Task[Any] | None,
) -> "ListeningServer":
    """Import the HTTP server, which takes a third of a second, and listen while the engine loads.

    Wait for the tokenizer first: of two cores, the engine needs one, and takes longest.
    """
    if behind is not None:
        await asyncio.wait([behind])
    return (await asyncio.to_thread(_import))(config, listener, parts_s)


def _import() -> "type[ListeningServer]":
    with uncollected():
        from legato.api.http_server import ListeningServer

    return ListeningServer


async def _stop(listening: "asyncio.Task[ListeningServer]") -> None:
    """End a server, also one that does not listen yet."""
    listening.cancel()
    await asyncio.wait([listening])
    if not listening.cancelled() and listening.exception() is None:
        await listening.result().stop()


def _bind(host: str, port: int) -> socket.socket:
    """Bind the address before slow work; clients are refused until `listen`."""
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


def _with_room(config: ServerConfig) -> ServerConfig:
    """Raise this process's limit of open files to hold the connections, as far as allowed.

    Returns:
        the configuration, with as many connections as there is room for.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + _OTHER_FILES
    room = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < room:
        resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
    if room == wanted:
        return config
    max_connections = max(1, room - min(_OTHER_FILES, room // 2))
    logger.warning(
        "%d connections at once rather than %d: this process may open %d files (ulimit -n)",
        max_connections,
        config.max_connections,
        room,
    )
    return msgspec.structs.replace(config, max_connections=max_connections)
