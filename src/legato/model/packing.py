"""Threads that pack weights while later ones are read, of which only a few wait in memory."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Packed = TypeVar("Packed")


class PackingThreads:
    """Packs weights; a context that ends when all are packed.

    At most one task for each thread, and one more, hold weights that are not packed.
    """

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads)
        self._num_threads = num_threads
        self._waiting: deque[Future[object]] = deque()

    def __enter__(self) -> "PackingThreads":
        self._threads.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown()

    def pack(self, make: Callable[..., Packed], *weights: object) -> "Future[Packed]":
        """Call `make` with the weights on a thread, after the oldest task if too many wait.

        Raises what an earlier task raised.
        """
        made = self._threads.submit(make, *weights)
        self._waiting.append(made)  # type: ignore[arg-type]
        if len(self._waiting) > self._num_threads:
            self._waiting.popleft().result()
        return made
