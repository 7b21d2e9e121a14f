"""A process that reads bodies one after another; the kernel bounds its time and memory."""

import logging
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from legato.api.http.errors import ApiError, as_api_error, out_of_memory
from legato.api.job import End, Part, Refused
from legato.api.limits import KEPT_MEMORY_BYTES, READER_MEMORY_BYTES
from legato.api.readers.reader_messages import BodyFollows, ReaderBegun, ReaderRetires
from legato.api.reading.request_reader import RequestReader
from legato.core.errors import InvalidRequestError
from legato.engine.process.channel import pack_frame

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_decode = msgspec.msgpack.Decoder(BodyFollows).decode
_STATM = Path("/proc/self/statm")
_PEAK_UNIT_BYTES = 1024 if sys.platform == "linux" else 1


def serve(sock: socket.socket, requests: RequestReader, timeout_s: float) -> None:
    """Answer each body with parts and an end, until the socket is closed.

    Args:
        timeout_s: of processor time for one body; the kernel ends a process that takes more.
    """
    first_bytes = _peak_memory_bytes()
    with suppress(ConnectionError):
        sock.sendall(pack_frame(ReaderBegun(os.getpid())))
        while True:
            job, body, stored = _next_body(sock)
            with time_bound(timeout_s):
                for message, frame in _outcome(requests, job, body, stored):
                    retires = isinstance(message, End) and (
                        _peak_memory_bytes() - first_bytes > KEPT_MEMORY_BYTES
                    )
                    if retires:
                        sock.sendall(pack_frame(ReaderRetires()))
                    sock.sendall(frame)
            if retires:
                return


def bound_memory() -> None:
    """Let this process take `READER_MEMORY_BYTES` more memory; no core dump if it fails."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _let_grow(READER_MEMORY_BYTES)


@contextmanager
def memory_bound(num_bytes: int) -> Iterator[None]:
    """Let this process take so much more memory within the block; beyond that, `MemoryError`."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    _let_grow(num_bytes)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _let_grow(num_bytes: int) -> None:
    """Lower the limit of this process's memory to so much more than it has, if it is higher."""
    if not _STATM.exists():  # only Linux enforces this limit
        return
    num_pages = int(_STATM.read_text().split()[0])
    limit = num_pages * resource.getpagesize() + num_bytes
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


@contextmanager
def time_bound(seconds: float) -> Iterator[None]:
    """Let the kernel end this process if the block takes more processor time.

    No other bound can stop a loop inside a library.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _outcome(
    requests: RequestReader, job: BodyFollows, body: bytes, stored: bytes | None
) -> Iterator[tuple[Part | End, bytes]]:
    """Yield each part and the end, with its frame."""
    try:
        for message in requests.read(job.kind, body, stored):
            yield message, pack_frame(message)
    except MemoryError:
        yield _refusal(out_of_memory())
    except OverflowError:  # an integer too large for msgpack
        yield _refusal(InvalidRequestError("the body has a number that is out of range"))
    except (ApiError, InvalidRequestError) as error:
        yield _refusal(error)
    except Exception as error:
        logger.exception("a body could not be read")
        yield _refusal(error)


def _refusal(error: Exception) -> tuple[End, bytes]:
    shown = as_api_error(error)
    refused = Refused(shown.status, shown.detail)
    return refused, pack_frame(refused)


def _next_body(sock: socket.socket) -> tuple[BodyFollows, bytes, bytes | None]:
    """Return a body and its stored responses.

    Raises:
        ConnectionError: the socket was closed.
    """
    (num_bytes,) = _LENGTH.unpack(_receive(sock, _LENGTH.size))
    job = _decode(_receive(sock, num_bytes))
    body, num_stored_bytes = _receive(sock, job.num_bytes), job.num_stored_bytes
    stored = None if num_stored_bytes is None else _receive(sock, num_stored_bytes)
    return job, body, stored


def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    rest = memoryview(data)
    while rest:
        num_received = sock.recv_into(rest)
        if not num_received:
            raise ConnectionResetError
        rest = rest[num_received:]
    return bytes(data)


def _peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT_BYTES
