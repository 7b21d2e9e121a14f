"""Measures how long a server lets others wait, and how long the machine itself does.

`python -m tests.fuzz.watch URL FILE` is a process of its own, so that nothing an attacker does
holds up its clock. It asks /health a hundred times a second, reads a stream, and bounces a byte off
yet another process, which does nothing else: what that waits for, the machine is to blame for.
"""

import asyncio
import multiprocessing
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import httpx
import msgspec

from legato_lab.load.token_stream import TokenStream
from legato_lab.simulation.record import RequestError
from tests.api.launch import ServerProcess, long_request, wait_until
from tests.api.wire import post

HEALTH, STREAM, MACHINE, BROKEN = "health", "stream", "machine", "broken"
"""What was waited for: an answer of /health, the next token of the stream, a byte from an idle
process. `BROKEN` is an answer that must not be."""

_HEALTH_S, _MACHINE_S = 0.01, 0.005
_PATIENCE_S = 120.0
_RETRY_S = 0.05
_SPARE_TOKENS = 16  # for the prompt
_MOST_IMPORTANT = -100
_GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Wait(msgspec.Struct, frozen=True, array_like=True):
    """One wait.

    Attributes:
        start_s: on the clock of `time.monotonic`, which all processes share.
        detail: what is broken.
    """

    what: str
    start_s: float
    took_s: float
    detail: str = ""

    @property
    def end_s(self) -> float:
        return self.start_s + self.took_s


@contextmanager
def watching(server: ServerProcess, file: Path) -> Iterator[None]:
    """Watch a server until the block ends; `file` holds the waits then."""
    command = [sys.executable, "-m", "tests.fuzz.watch", server.url, str(file)]
    process = subprocess.Popen(command)
    try:
        wait_until(lambda: _is_streaming(file), "the server does not stream")
        yield
    finally:
        process.terminate()
        process.wait()


def read_waits(file: Path) -> list[Wait]:
    """All that have ended by now."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [msgspec.json.decode(line, type=Wait) for line in lines]


def _is_streaming(file: Path) -> bool:
    waits = read_waits(file)
    broken = [wait.detail for wait in waits if wait.what == BROKEN]
    if broken:
        raise AssertionError(broken[0])
    return any(wait.what == STREAM for wait in waits)


class _Log:
    """Writes waits as they end, one a line."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def add(self, what: str, start_s: float, detail: str = "") -> None:
        wait = Wait(what, start_s, time.monotonic() - start_s, detail)
        self._file.write(msgspec.json.encode(wait) + b"\n")


async def _ask_health(port: int, log: _Log) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while True:
            start_s = time.monotonic()
            writer.write(_GET_HEALTH)
            async with asyncio.timeout(_PATIENCE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:-2])
                await reader.readexactly(int(fields[b"content-length"]))
            log.add(HEALTH, start_s)
            _check_status(head)
            await asyncio.sleep(_HEALTH_S)
    finally:
        writer.transport.abort()


async def _read_stream(port: int, num_tokens: int, log: _Log) -> None:
    """One stream to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = long_request(max_tokens=num_tokens, priority=_MOST_IMPORTANT)
    times_s: list[float] = []
    stream = TokenStream(times_s)
    try:
        writer.write(post("/v1/completions", request, "Connection: close\r\n"))
        async with asyncio.timeout(_PATIENCE_S):
            _check_status(await reader.readuntil(b"\r\n\r\n"))
        while chunk := await _read(reader):
            num_before = len(times_s)
            stream.feed(chunk, time.monotonic())
            if 0 < num_before < len(times_s):
                log.add(STREAM, times_s[num_before - 1])
        stream.end()
    finally:
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(_PATIENCE_S):
        return await reader.read(2**16)


def _check_status(head: bytes) -> None:
    if head.split(maxsplit=2)[1] != b"200":
        raise RequestError(head.decode(errors="replace"))


async def _bounce(sock: socket.socket, log: _Log) -> None:
    """From when it was due, so that oversleeping counts."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = time.monotonic() + _MACHINE_S
        await asyncio.sleep(_MACHINE_S)
        await loop.sock_sendall(sock, b".")
        await loop.sock_recv(sock, 1)
        log.add(MACHINE, due_s)


def _echo(near: socket.socket, far: socket.socket) -> None:
    near.close()
    while byte := far.recv(1):
        far.sendall(byte)


async def _again(log: _Log, what: str, watch: Callable[[], Awaitable[None]]) -> None:
    """Begin anew whenever it has ended."""
    while True:
        start_s = time.monotonic()
        try:
            await watch()
        except (OSError, asyncio.IncompleteReadError, RequestError) as error:
            log.add(BROKEN, start_s, f"{what}: {type(error).__name__}: {error}")
            await asyncio.sleep(_RETRY_S)


async def _watch(url: str, log: _Log, echo: socket.socket) -> None:
    port = urlsplit(url).port or 0
    max_model_len = httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"]
    num_tokens = max_model_len - _SPARE_TOKENS
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_bounce(echo, log))
        tasks.create_task(_again(log, HEALTH, lambda: _ask_health(port, log)))
        tasks.create_task(_again(log, STREAM, lambda: _read_stream(port, num_tokens, log)))


def _main(url: str, file: str) -> None:
    near, far = socket.socketpair()
    near.setblocking(False)
    multiprocessing.get_context("fork").Process(target=_echo, args=(near, far), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Path(file).open("wb", buffering=0) as lines:
        asyncio.run(_watch(url, _Log(lines), near))


if __name__ == "__main__":
    _main(*sys.argv[1:])
