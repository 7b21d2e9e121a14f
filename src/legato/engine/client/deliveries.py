"""Measures delivered gaps between tokens against promises, and the delay from step to client."""

import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from legato.core.slo import SloClass
from legato.core.stats import KeptPromise

_SLICE_S, _NUM_SLICES = 10.0, 6
_BINS_PER_PROMISE, _NUM_BINS = 100, 400


class RecentGaps:
    """Gaps of the last minute, counted by their share of the promised gap.

    Adding one takes constant time. A quantile is exact to a hundredth of the promise; gaps of more
    than four times the promise count as four times.
    """

    def __init__(self, promise_s: float) -> None:
        self._promise_s = promise_s
        self._slices: deque[tuple[int, list[int]]] = deque(maxlen=_NUM_SLICES)

    def add(self, gap_s: float, now_s: float) -> None:
        current = int(now_s / _SLICE_S)
        if not self._slices or self._slices[-1][0] != current:
            self._slices.append((current, [0] * (_NUM_BINS + 1)))
        place = min(_NUM_BINS, _BINS_PER_PROMISE * gap_s / self._promise_s)
        self._slices[-1][1][int(place)] += 1

    def quantile_s(self, quantile: float, now_s: float) -> float | None:
        """Return the shortest time that this share of gaps is within; None without gaps."""
        oldest = int(now_s / _SLICE_S) - _NUM_SLICES
        recent = [bins for index, bins in self._slices if index > oldest]
        counts = [sum(bins) for bins in zip(*recent, strict=True)]
        num_within, wanted = 0, quantile * sum(counts)
        for place, count in enumerate(counts):
            num_within += count
            if count and num_within >= wanted:
                return (place + 1) / _BINS_PER_PROMISE * self._promise_s
        return None


class StreamDelivery(msgspec.Struct):
    """When a request last got a token; None before the first."""

    slo_class: str
    last_s: float | None = None


class Deliveries:
    """Measures the delivery of each step's tokens.

    Args:
        classes: of service; key the name.
        on_later: called after each step with prefill beside decodes, with how many seconds longer
            its tokens took from the step's end to delivery than those of the step before.
    """

    def __init__(
        self, classes: Mapping[str, SloClass], on_later: Callable[[float], object]
    ) -> None:
        self._on_later = on_later
        self._way_s = 0.0
        self.promise(classes)

    def promise(self, classes: Mapping[str, SloClass]) -> None:
        """Measure against these promises from now on."""
        self._promises = {name: slo for name, slo in classes.items() if slo.itl_s is not None}
        self._gaps = {name: RecentGaps(slo.itl_s or 0.0) for name, slo in self._promises.items()}

    def kept(self) -> dict[str, KeptPromise]:
        """Return what is promised and delivered; key the class."""
        now_s = time.monotonic()
        return {
            name: KeptPromise(
                itl_s=slo.itl_s or 0.0,
                quantile=slo.itl_quantile,
                delivered_s=self._gaps[name].quantile_s(slo.itl_quantile, now_s),
            )
            for name, slo in self._promises.items()
        }

    def note(self, stream: StreamDelivery, now_s: float) -> None:
        """Count the gap that a stream's new token ends."""
        gaps = self._gaps.get(stream.slo_class)
        if stream.last_s is not None and gaps is not None:
            gaps.add(now_s - stream.last_s, now_s)
        stream.last_s = now_s

    def end_step(self, ended_s: float, now_s: float, *, is_mixed: bool) -> None:
        """Note that all tokens of a step were delivered.

        Args:
            ended_s: when the step ended.
            is_mixed: whether it held prefill beside decodes.
        """
        way_s = now_s - ended_s
        if is_mixed and self._promises:
            self._on_later(way_s - self._way_s)
        self._way_s = way_s
