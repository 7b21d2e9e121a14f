"""What streams were given, by the time at which their tokens were handed on: whether promises on
gaps are kept, and how the way to clients adds to them."""

import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from legato.core.slo import SloClass
from legato.core.stats import KeptPromise

_SLICE_S, _NUM_SLICES = 10.0, 6
_BINS_PER_PROMISE, _NUM_BINS = 100, 400


class RecentGaps:
    """Gaps of the last minute, counted by how much of what is promised each took.

    Adding one takes the same time however many there are; a quantile is right to a hundredth of
    the promise, and gaps of more than four times that count as such.
    """

    def __init__(self, promised_s: float) -> None:
        self._promised_s = promised_s
        self._slices: deque[tuple[int, list[int]]] = deque(maxlen=_NUM_SLICES)

    def add(self, gap_s: float, now_s: float) -> None:
        current = int(now_s / _SLICE_S)
        if not self._slices or self._slices[-1][0] != current:
            self._slices.append((current, [0] * (_NUM_BINS + 1)))
        place = min(_NUM_BINS, _BINS_PER_PROMISE * gap_s / self._promised_s)
        self._slices[-1][1][int(place)] += 1

    def quantile_s(self, quantile: float, now_s: float) -> float | None:
        """The shortest seconds that so large a share is within; None where there are no gaps."""
        oldest = int(now_s / _SLICE_S) - _NUM_SLICES
        counts = [sum(bins) for bins in zip(*self._recent(oldest), strict=True)]
        num_within, wanted = 0, quantile * sum(counts)
        for place, count in enumerate(counts):
            num_within += count
            if count and num_within >= wanted:
                return (place + 1) / _BINS_PER_PROMISE * self._promised_s
        return None

    def _recent(self, oldest: int) -> list[list[int]]:
        return [bins for index, bins in self._slices if index > oldest]


class StreamDelivery(msgspec.Struct):
    """When a request was last given a token; None before the first."""

    slo_class: str
    last_s: float | None = None


class Deliveries:
    """Follows the steps as their tokens have been handed on.

    Args:
        classes: of service; key the name.
        on_later: told, of each step with prefill beside decodes, by how many seconds longer than
            the step before its tokens were on their way from the end of the step.
    """

    def __init__(
        self, classes: Mapping[str, SloClass], on_later: Callable[[float], object]
    ) -> None:
        self._on_later = on_later
        self._way_s = 0.0
        self.promise(classes)

    def promise(self, classes: Mapping[str, SloClass]) -> None:
        """Go by these promises from now on."""
        self._promises = {name: slo for name, slo in classes.items() if slo.itl_s is not None}
        self._gaps = {name: RecentGaps(slo.itl_s or 0.0) for name, slo in self._promises.items()}

    def kept(self) -> dict[str, KeptPromise]:
        """What is promised and delivered; key the class."""
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
        """Count the gap that a stream's new token ended."""
        gaps = self._gaps.get(stream.slo_class)
        if stream.last_s is not None and gaps is not None:
            gaps.add(now_s - stream.last_s, now_s)
        stream.last_s = now_s

    def end_step(self, ended_s: float, now_s: float, *, is_mixed: bool) -> None:
        """All tokens of a step have been handed on.

        Args:
            ended_s: when the step had ended.
            is_mixed: whether it held prefill beside decodes.
        """
        way_s = now_s - ended_s
        if is_mixed and self._promises:
            self._on_later(way_s - self._way_s)
        self._way_s = way_s
