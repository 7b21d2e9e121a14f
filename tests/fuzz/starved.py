"""Runs a server in a memory cgroup that holds less than it needs, under traffic.

The kernel then kills one process or another. Each request ends, a server that cannot go on says so
and leaves no process behind, and one that goes on recovers once it has its memory again.
"""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import msgspec

from tests.api.launch import ServerProcess, running_server, wait_until
from tests.fuzz.stopped import ask, wait_for_health

_FLAGS = ("--max-num-seqs", "16", "--log-level", "warning")
_ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
"""Of version 1, which is a tree of its own, and of version 2."""
_LIMITS = ("memory.limit_in_bytes", "memory.max")
_START_PATIENCE_S = 240.0
_NUM_CLIENTS = 6
_LEAST, _MOST = 0.25, 1.0
_HALF = 0.5
_STEP = 0.05


class Starved(msgspec.Struct):
    """What came of all cases.

    Attributes:
        needed_bytes: most that a server took that had all it wanted.
        told: key the share of the memory and what came of it.
        failures: what must not have been.
    """

    needed_bytes: int
    told: Counter[str]
    failures: list[str]


class MemoryGroup:
    """A memory cgroup of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_v1 = (path / _LIMITS[0]).exists()

    def enter(self) -> None:
        """Move the calling process into the group."""
        (self._path / "cgroup.procs").write_text(str(os.getpid()))

    def limit(self, num_bytes: int | None) -> None:
        """Limit the group's memory; None for no limit."""
        none = "-1" if self._is_v1 else "max"
        file = self._path / _LIMITS[0 if self._is_v1 else 1]
        file.write_text(none if num_bytes is None else str(num_bytes))

    @property
    def peak_bytes(self) -> int:
        name = "memory.max_usage_in_bytes" if self._is_v1 else "memory.peak"
        return int((self._path / name).read_text())

    @property
    def pids(self) -> list[int]:
        """Processes that are in the group."""
        return [int(line) for line in (self._path / "cgroup.procs").read_text().split()]


@contextmanager
def memory_group() -> Iterator[MemoryGroup | None]:
    """A group that is removed in the end; None where none can be made."""
    path: Path | None = None
    for root, limit in zip(_ROOTS, _LIMITS, strict=True):
        candidate = root / f"legato-test-{os.getpid()}-{time.monotonic_ns()}"
        with suppress(OSError):
            candidate.mkdir()
            if (candidate / limit).exists():
                path = candidate
                break
            candidate.rmdir()
    group = None if path is None else MemoryGroup(path)
    yield group
    if path is not None and group is not None:
        _wait_until_empty(group)
        path.rmdir()


def _wait_until_empty(group: MemoryGroup) -> None:
    wait_until(lambda: not group.pids, f"of the processes {group.pids} some are left behind")


def starve(seeds: Iterable[int], seconds: float, folder: Path) -> Starved | None:
    """Start servers in groups of too little memory for so long; None where none can be made."""
    with memory_group() as group:
        if group is None:
            return None
        with _server(group, folder) as server:
            _attacked(server, random.Random(0))
        needed_bytes = group.peak_bytes
    found = Starved(needed_bytes, Counter(), [])
    end_s = time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() > end_s:
            break
        rng = random.Random(seed)
        share = _HALF if seed % 2 == 0 else rng.uniform(_LEAST, _MOST)
        is_late = rng.random() < 0.5
        kind = f"{share:.0%} {'while it serves' if is_late else 'from the start'}"
        try:
            came = _starved(rng, int(share * needed_bytes), folder, is_late=is_late)
            found.told[f"{kind} {came}"] += 1
        except Exception as error:
            found.failures.append(f"seed {seed}, {kind}: {type(error).__name__}: {error}")
    return found


def _starved(rng: random.Random, num_bytes: int, folder: Path, *, is_late: bool) -> str:
    """Run one server; return what came of it, in one word.

    Args:
        is_late: whether it has all it wants until it serves.
    """
    with memory_group() as group:
        assert group is not None
        if not is_late:
            group.limit(num_bytes)
        came = "recovered"
        try:
            with _server(group, folder) as server:
                if is_late:
                    _lower(group, num_bytes)
                _attacked(server, rng)
                group.limit(None)
                if _is_gone(server):
                    came = "ended"
                else:
                    wait_for_health(server)
                    server.http.post("/v1/completions", json={"prompt": "Hi"}).raise_for_status()
        except _NotStartedError:
            came = "refused"
        _wait_until_empty(group)
        log = (folder / "server.log").read_text()
        assert "Traceback" not in log, log[log.index("Traceback") :]
        return came


def _lower(group: MemoryGroup, num_bytes: int) -> None:
    """Set a limit, or the lowest one above it that the kernel takes: it kills nothing for that."""
    while True:
        try:
            group.limit(num_bytes)
        except OSError:
            num_bytes += int(_STEP * num_bytes)
        else:
            return


class _NotStartedError(Exception):
    """The server ended before it served."""


@contextmanager
def _server(group: MemoryGroup, folder: Path) -> Iterator[ServerProcess]:
    """A server in a group; all of the group is killed if it does not start in time."""
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        for pid in group.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)

    timer = threading.Timer(_START_PATIENCE_S, end)
    timer.start()
    try:
        with running_server(folder, *_FLAGS, is_forked=False, before=group.enter) as server:
            timer.cancel()
            yield server
    except AssertionError as error:
        assert not is_late.is_set(), "it neither started nor ended"
        if "did not start" not in str(error):
            raise
        assert (folder / "server.log").read_text().strip(), "it has not said why it did not start"
        raise _NotStartedError from error
    finally:
        timer.cancel()


def _attacked(server: ServerProcess, rng: random.Random) -> None:
    """Have clients ask; a connection may be lost only because the HTTP server is."""
    with ThreadPoolExecutor(_NUM_CLIENTS) as pool:
        asking = [pool.submit(ask, server, rng.randrange(2**32)) for _ in range(_NUM_CLIENTS)]
        asking.append(pool.submit(_ask_much, server, rng))
        for one in asking:
            try:
                one.result()
            except httpx.TransportError:
                wait_until(lambda: _is_gone(server), "a connection was lost")


def _ask_much(server: ServerProcess, rng: random.Random) -> None:
    text = "word " * rng.randrange(10**6)
    status = server.http.post("/tokenize", json={"prompt": text}).status_code
    assert status in (200, 400, 413, 429, 500, 503), status


def _is_gone(server: ServerProcess) -> bool:
    return server.process.poll() is not None
