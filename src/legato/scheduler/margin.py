"""How far steps exceed their prediction: the margin of a promise, and a step's own deadline."""

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from legato.core.request import Request
from legato.core.slo import P99, SloClass

_MANY_GAPS_MISS_RATE, _FEW_GAPS_MISS_RATE = 0.1, 0.02
"""The margin aims at this share of the late gaps that a promise allows. A stream of few gaps may
have none that is late, and on a busy server a prompt is beside each of them: so 98 in 100 such
streams have none. A stream of many may have some, and hardly more gaps beside a prompt than allow
it one: so nine in ten have none of these."""
_LEAST_EAGERNESS = 0.125
"""Least factor of the feedback on the share of late steps; the largest is 1."""
_BODY, _BODY_STEPS = 0.9, 256
"""The body of the errors: this quantile of the last so many steps."""
_LEAST_BODY = 0.02
_MEMORY_S = 300.0
"""Seconds of steps for which an interruption is remembered."""
_UNSEEN = 0.12
"""One interruption of this share of the limit counts as seen. So a server that knows little, or
that has seen none for long, leaves room for one."""
_SPARE = 1.1
"""Factor on known interruptions: the largest future one is a little larger."""
_LONGEST_WATCHED_S = 0.1
"""Longest step without a limit that is watched for interruptions: the noise of a long step, as in a
calibration, would pass for an interruption of short ones."""
_PREVENTABLE = 0.5
"""Largest share of the limit that a margin covers. Longer interruptions are not counted: to avoid
them, all steps would have to be half as long."""
LARGEST_FACTOR = 1.0 / _PREVENTABLE
"""The largest factor that a margin has on a prediction."""
_LEAST_LIMIT_S = 1e-9
"""A shorter limit leaves no step any time, and has no margin of its own."""
_CHEAP, _DEAR, _DEAR_BY = 1.0 / 3.0, 0.0025, 5.0
"""Room of this share of the limit is left for the rarest interruption. More takes most of what a
prompt has of a step, and is left only against a larger chance of a late step than is aimed at: this
one, or so many times the aim if that is less. Else one interruption in five minutes would make
prompts half as fast for as long."""


def is_bound(limit_s: float) -> bool:
    """Whether a limit bounds steps: neither passed (zero or less), nor infinite, nor nan."""
    return _LEAST_LIMIT_S < limit_s < math.inf


def allowed_miss_rate(requests: Iterable[Request], classes: Iterable[SloClass]) -> float:
    """Return the largest chance of a late step that the promises of all these requests bear.

    Requests without a token do not count yet.

    Args:
        requests: those with the fewest tokens had best be first.
        classes: of every request, so that none bears less than a new request of the strictest.
    """
    quantiles = [slo.itl_quantile for slo in classes if slo.promise_s is not None]
    least, found = _bearable(max(quantiles, default=P99), 0), math.inf
    for request in requests:
        if request.first_token_s is not None and request.promise_s < math.inf:
            found = min(found, _bearable(request.slo.itl_quantile, request.num_output_tokens))
            if found <= least:
                break
    return _NEW if found == math.inf else found


def _bearable(quantile: float, num_gaps: int) -> float:
    late = 1.0 - quantile
    return late * (_MANY_GAPS_MISS_RATE if num_gaps * late >= 1.0 else _FEW_GAPS_MISS_RATE)


_NEW = _bearable(P99, 0)


class RecentQuantile:
    """Keeps the last values in order. They are few: a list of them is faster than a tree.

    Args:
        window: how many values are kept, None included.
        quantile: in [0, 1).
        values: first values, the oldest first.
    """

    def __init__(self, window: int, quantile: float, values: Iterable[float | None] = ()) -> None:
        self._window = window
        self._quantile = quantile
        self._recent: deque[float | None] = deque()
        self._ordered: list[float] = []
        for value in values:
            self.add(value)

    def __iter__(self) -> Iterator[float | None]:
        """Iterate over the kept values, the oldest first."""
        return iter(self._recent)

    def __len__(self) -> int:
        """Number of kept values that are not None."""
        return len(self._ordered)

    @property
    def value(self) -> float:
        """The quantile; there must be a value."""
        return self._ordered[int(self._quantile * len(self._ordered))]

    def add(self, value: float | None) -> None:
        """Add a value; None or nan only makes older values expire."""
        if value is not None and math.isnan(value):
            value = None  # nan has no place in an order, and could not be removed again
        self._recent.append(value)
        if value is not None:
            insort(self._ordered, value)
        if len(self._recent) > self._window:
            oldest = self._recent.popleft()
            if oldest is not None:
                del self._ordered[bisect_left(self._ordered, oldest)]


class Tails(msgspec.Struct, frozen=True, kw_only=True):
    """How long steps took beyond their predictions, as a margin remembers it.

    Attributes:
        body: relative errors of the last steps with prefill beside decodes, the oldest first.
        watched_s: seconds of steps that were watched for interruptions.
        interruptions_s: their sizes, the oldest first, in seconds beyond the body.
    """

    body: tuple[float, ...] = ()
    watched_s: float = 0.0
    interruptions_s: tuple[float, ...] = ()


class Margin:
    """Learns the longest step that a promise allows, from how far steps exceed their predictions.

    A step exceeds its prediction in two ways. Errors of the prediction and the noise of the machine
    grow with the step: the body, a quantile of relative errors. An interruption takes the same time
    whether it hits a short step or a long one, and hits a long one more often: so steps of all
    lengths tell its rate per second and its size. They are peaks over a threshold, the body
    (Pickands, "Statistical inference using extreme order statistics", 1975). The longest step is
    chosen such that its body fits into the limit, and the chance of an interruption that makes it
    late is as small as aimed at.

    The aim follows what was delivered: it halves with each late step, and doubles, up to what is
    aimed at, over as many steps in time as should have one late step between them. So few steps are
    late even if interruptions change or come in groups (adaptive conformal inference: Gibbs and
    Candès, NeurIPS 2021).

    Args:
        tails: what earlier runs on this machine remember; numbers that are not finite are left
            out.
    """

    def __init__(self, tails: Tails | None = None) -> None:
        tails = tails or Tails()
        body = (_clipped(error) for error in tails.body if math.isfinite(error))
        self._body = RecentQuantile(_BODY_STEPS, _BODY, body)
        self._decode_body = RecentQuantile(_BODY_STEPS, _BODY)
        self._watched_s = tails.watched_s if 0.0 < tails.watched_s < math.inf else 0.0
        sizes_s = [size_s for size_s in tails.interruptions_s if 0.0 < size_s < math.inf]
        self._peaks: deque[tuple[float, float]] = deque(
            (self._watched_s, size_s) for size_s in sizes_s
        )
        self._sizes_s = sorted(sizes_s)
        self._eagerness = 1.0
        self._factors: dict[float, float] = {}  # key a limit; until something is learned
        self._aim = _NEW

    @property
    def tails(self) -> Tails:
        """What to remember for later runs on this machine."""
        return Tails(
            body=tuple(error for error in self._body if error is not None),
            watched_s=min(self._watched_s, _MEMORY_S),
            interruptions_s=tuple(size_s for _, size_s in self._peaks),
        )

    def set_miss_rate(self, late: float) -> None:
        """Aim at another chance of a late step; keep what is known of the machine."""
        if late != self._aim:
            self._aim = late
            self._factors.clear()

    def factor(self, limit_s: float) -> float:
        """Return the factor on the prediction of a step that must end in `limit_s`.

        It is from 1 to `LARGEST_FACTOR`, also if the limit has passed or there is none.
        """
        if not is_bound(limit_s):
            return self.body_factor
        factor = self._factors.get(limit_s)
        if factor is None:
            factor = self._factors[limit_s] = limit_s / self._longest_s(limit_s)
        return factor

    def observe(
        self, predicted_s: float, taken_s: float, limit_s: float | None, *, is_mixed: bool
    ) -> None:
        """Record a delivered step, unless its times cannot be true.

        Args:
            limit_s: how long it was allowed to take; None if nothing was promised.
            is_mixed: it had prefill beside decodes. Other steps show interruptions alone.
        """
        if not (0.0 < predicted_s < math.inf and math.isfinite(taken_s)):
            return
        if limit_s is not None and not math.isfinite(limit_s):
            limit_s = None
        body = self._body if is_mixed else self._decode_body
        threshold = body.value if len(body) else _LEAST_BODY
        if limit_s is not None or predicted_s <= _LONGEST_WATCHED_S:
            self._watched_s += min(predicted_s, _MEMORY_S)
            self._note_peak(taken_s - predicted_s * (1.0 + threshold))
        body.add(_share(predicted_s, taken_s - predicted_s, limit_s))
        if is_mixed and limit_s is not None:
            self._follow(taken_s - predicted_s, taken_s - limit_s, limit_s)
        self._factors.clear()

    def expire(self) -> None:
        """Forget a little.

        A margin that keeps prefill out of all steps observes no errors, so it would never shrink.
        """
        self._body.add(None)
        self._regain()
        self._factors.clear()

    @property
    def body_factor(self) -> float:
        """Factor on the prediction of a step whose interruptions need no room, at least 1."""
        return 1.0 + max(_LEAST_BODY, self._body.value if len(self._body) else 0.0)

    def _longest_s(self, limit_s: float) -> float:
        """Return the longest prediction whose step ends in `limit_s` as often as aimed at."""
        longest_s = self._longest_at(self._aim, limit_s)
        cheap_s = (1.0 - _CHEAP) * limit_s / self.body_factor
        if longest_s < cheap_s:
            borne = max(self._aim, min(_DEAR, _DEAR_BY * self._aim))
            longest_s = min(cheap_s, self._longest_at(borne, limit_s))
        return max(limit_s / LARGEST_FACTOR, longest_s)

    def _longest_at(self, aim: float, limit_s: float) -> float:
        """Return the longest step with at most this chance to be late.

        If the step leaves room for all interruptions but the n largest, these n make it late. Their
        chance bounds the step by the aim; their number is chosen such that the step is longest.
        """
        sizes_s, body_factor = self._sizes_s, self.body_factor
        num_known = bisect_right(sizes_s, _PREVENTABLE * limit_s)
        unseen_s = _UNSEEN * limit_s
        num_larger = num_known - bisect_right(sizes_s, unseen_s / _SPARE)
        watched_s = min(self._watched_s, _MEMORY_S)
        aimed_s = aim * self._eagerness * watched_s

        def by_size_s(num_late: int) -> float:
            """Longest step that leaves room for all but the largest interruptions."""
            if num_late == num_larger:
                size_s = unseen_s
            else:
                index = num_known - num_late - (num_late < num_larger)
                size_s = _SPARE * sizes_s[index] if index >= 0 else 0.0
            return (limit_s - size_s) / body_factor

        most = bisect_left(range(1, num_known + 2), True, key=lambda n: aimed_s / n <= by_size_s(n))
        # Of `most` interruptions the size bounds the step, of one more the rate.
        return max(by_size_s(most), min(aimed_s / (most + 1), by_size_s(most + 1)))

    def _note_peak(self, size_s: float) -> None:
        if size_s > 0.0:
            self._peaks.append((self._watched_s, size_s))
            insort(self._sizes_s, size_s)
        while self._peaks and self._peaks[0][0] < self._watched_s - _MEMORY_S:
            _, size_s = self._peaks.popleft()
            del self._sizes_s[bisect_left(self._sizes_s, size_s)]

    def _follow(self, longer_s: float, late_s: float, limit_s: float) -> None:
        if late_s > 0.0 and longer_s <= _PREVENTABLE * limit_s:
            self._eagerness = max(_LEAST_EAGERNESS, self._eagerness / 2.0)
        else:
            self._regain()

    def _regain(self) -> None:
        self._eagerness = min(1.0, self._eagerness * 2.0**self._aim)


def _share(predicted_s: float, longer_s: float, limit_s: float | None) -> float:
    """Return a step's extra time as a share of the longest prediction that it would make late.

    A step may be predicted to take less than it is allowed. Its extra time, such as the delivery's,
    is then a larger share of its own prediction, and would make steps shorter and shorter.
    """
    if limit_s is None or limit_s <= predicted_s:
        share = longer_s / predicted_s
    else:
        share = longer_s / (limit_s - longer_s) if longer_s < limit_s else math.inf
    return _clipped(share)


def _clipped(error: float) -> float:
    """Return a relative error as far as a margin can cover it: a step is not infinitely late."""
    return min(max(error, -1.0), LARGEST_FACTOR - 1.0)


_STEPS, _IN_TIME = 256, 0.99
"""The guard covers this quantile of what the last so many steps took after their last look. Bursts
of requests, which keep the processes in front of the engine busy, hit one step of a hundred."""
_FEW_STEPS, _FIRST_GUARD = 16, 0.05
"""With fewer steps, the guard is this share of the limit."""
_LEAST_GUARD, _LARGEST_GUARD = 0.02, 0.25
"""Shares of the limit. Less would leave no time for the way to the clients, which is not measured;
more would drop rows of steps that are in time."""
_DROPPED = 0.02
"""Share of prefill rows that steps may drop in the long run. They are computed again."""
_LONGEST_LATE = 1.5
"""Steps that took more than this multiple of their limit do not count: shorter ones would be late,
too."""
_PER_DROPPED, _PER_LATE, _MOST_SHORTENING = 0.1, 0.03, 0.5
"""How much a shortening rises with a step that drops all rows, and with a late one; its bound."""


class Deadlines:
    """Learns the guard before a step's limit, and how much shorter steps are to be planned.

    After an executor's last look at the clock come a few layers, the sampling and the delivery of
    the tokens. The guard is a high quantile of what all that took beyond what was foreseen then,
    interruptions included.

    A step that drops rows, or is late, was planned too long. A shortening for each rises then, and
    falls while all is well, so that few rows are computed in vain and few steps are late in the
    long run on any machine (adaptive conformal inference: Gibbs and Candès, NeurIPS 2021).
    """

    def __init__(self) -> None:
        self._unforeseen_s = RecentQuantile(_STEPS, _IN_TIME)
        self._late = 0.0
        self._dropped_shortening = self._late_shortening = 0.0

    @property
    def shortening(self) -> float:
        """Share by which steps that may drop rows are planned to be shorter."""
        return max(self._dropped_shortening, self._late_shortening)

    def set_miss_rate(self, late: float) -> None:
        """Set the chance of a late step that a margin would aim at."""
        self._late = late

    def guard_s(self, limit_s: float) -> float:
        """Return how long before its limit a step's layers must end; 0 if nothing bounds it."""
        if not is_bound(limit_s):
            return 0.0
        if len(self._unforeseen_s) < _FEW_STEPS:
            return _FIRST_GUARD * limit_s
        guard_s = max(_LEAST_GUARD * limit_s, self._unforeseen_s.value)
        return min(guard_s, _LARGEST_GUARD * limit_s)

    def observe(
        self, delivered_s: float, limit_s: float, foreseen_s: float | None, dropped: float
    ) -> None:
        """Record a step that had a deadline.

        Args:
            foreseen_s: as in `StepResult`.
            dropped: share of its prefill rows that were dropped.
        """
        if foreseen_s is not None:
            self._unforeseen_s.add(delivered_s - foreseen_s)
        is_late = limit_s < delivered_s <= _LONGEST_LATE * limit_s
        self._adjust_shortening(dropped, float(is_late))

    def expire(self) -> None:
        """Forget a little: a shortening that keeps prefill out of all steps observes nothing."""
        self._adjust_shortening(0.0, 0.0)

    def _adjust_shortening(self, dropped: float, late: float) -> None:
        for_dropped = self._dropped_shortening + _PER_DROPPED * (dropped - _DROPPED)
        for_late = self._late_shortening + _PER_LATE * (late - self._late)
        self._dropped_shortening = min(max(0.0, for_dropped), _MOST_SHORTENING)
        self._late_shortening = min(max(0.0, for_late), _MOST_SHORTENING)
