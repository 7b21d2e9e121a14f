"""What all processes of a server hold in memory: its engine, and the others together."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil

from tests.api.launch import ServerProcess

_SAMPLE_S, _GROWTH_SAMPLE_S = 0.25, 0.05


def held_bytes(server: ServerProcess) -> Counter[str]:
    """Key the part of the server; value what its processes have resident.

    Pages that processes share are divided among them where the system tells (PSS), so that the sum
    counts each once. Telling that takes the processes' time.
    """
    held: Counter[str] = Counter()
    for process in _processes(server):
        try:
            memory = process.memory_full_info()
            held[_part(process)] += getattr(memory, "pss", memory.rss)
        except psutil.NoSuchProcess:
            continue
    return held


class Peak:
    """Attributes: num_bytes: most that all of them had resident, shared pages counted by each."""

    def __init__(self) -> None:
        self.num_bytes = 0


@contextmanager
def watching_peak(server: ServerProcess) -> Iterator[Peak]:
    """Look often, until the block ends."""
    peak = Peak()

    def look() -> None:
        peak.num_bytes = max(peak.num_bytes, _resident_bytes(server))

    with _calling(look, _SAMPLE_S):
        yield peak


@contextmanager
def watching_growth(server: ServerProcess) -> Iterator[dict[str, int]]:
    """Look often, until the block ends; then value is by how many bytes the process grew.

    The key is the process's command and id. One that begins meanwhile, as readers do, is measured
    from when it was first seen.
    """
    first: dict[str, int] = {}
    growth: dict[str, int] = {}

    def look() -> None:
        for process in _processes(server):
            with suppress(psutil.NoSuchProcess):
                name, num_bytes = _name(process), process.memory_info().rss
                grown = num_bytes - first.setdefault(name, num_bytes)
                growth[name] = max(growth.get(name, 0), grown)

    with _calling(look, _GROWTH_SAMPLE_S):
        yield growth


@contextmanager
def _calling(look: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call `look` on a thread every so many seconds, until the block ends."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.wait(every_s):
            look()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _name(process: psutil.Process) -> str:
    return f"{' '.join(process.cmdline()[:4])} ({process.pid})"


def _resident_bytes(server: ServerProcess) -> int:
    num_bytes = 0
    for process in _processes(server):
        try:
            num_bytes += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return num_bytes


def _processes(server: ServerProcess) -> list[psutil.Process]:
    root = psutil.Process(server.process.pid)
    return [root, *root.children(recursive=True)]


def _part(process: psutil.Process) -> str:
    """Of the server: what reads grows and shrinks with what the HTTP process holds for it."""
    return "engine" if "legato.engine.main" in process.cmdline() else "front end"
