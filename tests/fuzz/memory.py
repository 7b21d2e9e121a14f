"""What all processes of a server hold in memory: its engine, and the others together."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from tests.server.launch import ServerProcess

_SAMPLE_S = 0.25


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
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(_SAMPLE_S):
            peak.num_bytes = max(peak.num_bytes, _resident_bytes(server))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()


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
    return "engine" if "legato.engine.process.main" in process.cmdline() else "front end"
