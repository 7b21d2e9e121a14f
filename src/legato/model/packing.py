"""Threads that pack weights while later ones are read; only a few weights wait in memory."""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from legato.model.quantization import QuantizedWeight, held_bytes

Packed = TypeVar("Packed")

_MOST_BYTES = 2**30
"""Of weights that wait, unless one task has more: 4-bit codes are unpacked to bytes."""


class PackingThreads:
    """Packs weights; a context that ends when all are packed.

    At most one task for each thread, and one more, hold weights that are not packed; fewer if the
    weights are large.

    Args:
        num_threads: that pack. The thread that reads waits for them.
    """

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads)
        self._num_threads = num_threads
        self._waiting: deque[tuple[Future[Any], int]] = deque()
        self._num_bytes = 0

    def __enter__(self) -> "PackingThreads":
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown()

    def pack(self, make: Callable[..., Packed], *weights: object) -> "Future[Packed]":
        """Call `make` with the weights on a thread; wait for the oldest tasks if too many wait.

        Raises what an earlier task raised.
        """
        num_bytes = sum(map(_num_bytes, weights))
        made = self._threads.submit(make, *weights)
        self._waiting.append((made, num_bytes))
        self._num_bytes += num_bytes
        while len(self._waiting) > self._num_threads or (
            self._num_bytes > _MOST_BYTES and len(self._waiting) > 1
        ):
            oldest, num_bytes = self._waiting.popleft()
            oldest.result()
            self._num_bytes -= num_bytes
        return made


def _num_bytes(weights: object) -> int:
    """Return the memory of a weight, or of the weights in a mapping; 0 of other arguments."""
    if isinstance(weights, Mapping):
        return sum(map(_num_bytes, weights.values()))
    return held_bytes(weights) if isinstance(weights, torch.Tensor | QuantizedWeight) else 0
