"""Metrics of promises kept and missed, by service class."""

from collections import Counter
from collections.abc import Callable, Mapping

from legato.core.outputs import FinishReason
from legato.core.slo import SloClass
from legato.core.stats import KeptPromise
from legato.observe.metrics.registry import MetricRegistry, count_of

_FINISHED = (FinishReason.STOP, FinishReason.LENGTH)


class SloMetrics:
    """Counts kept and missed promises of each class.

    Args:
        classes: key the class's name.
        kept: returns the promises on gaps, by class's name; called once a scrape.
    """

    def __init__(
        self,
        registry: MetricRegistry,
        classes: Mapping[str, SloClass],
        kept: Callable[[], Mapping[str, KeptPromise]],
    ) -> None:
        promises = registry.section("Promises")
        self._seconds = promises.gauge(
            "slo_seconds", "What is promised: `ttft`, `itl`, `tpot`.", "slo_class", "slo", own=True
        )
        promises.read_gauges(
            "slo_quantile",
            "Share of a request's gaps that `slo_seconds` is promised for.",
            "slo_class",
            read=lambda: {(name,): promise.quantile for name, promise in kept().items()},
            own=True,
        )
        promises.read_gauges(
            "slo_delivered_seconds",
            "Quantile `slo_quantile` of all gaps of the last minute; at most `slo_seconds` "
            "while the promise is kept.",
            "slo_class",
            read=lambda: {
                (name,): promise.delivered_s
                for name, promise in kept().items()
                if promise.delivered_s is not None
            },
            own=True,
        )
        self._all_checks = promises.counter(
            "slo_checks",
            "Promises that fell due, `in_time` or `late`: first tokens (TTFT SLO), gaps between "
            "deliveries of tokens (ITL SLO), requests' mean times a token (TPOT SLO).",
            "slo_class",
            "slo",
            "verdict",
            own=True,
        )
        self._all_requests = promises.counter(
            "slo_requests",
            "Requests that `attained` their promise (99 % of gaps in time, or the ITL SLO's "
            "quantile), `missed` it, were `refused`, or `waived` it (`allow_best_effort`); "
            "without requests whose client left.",
            "slo_class",
            "verdict",
            own=True,
        )
        self.promise(classes)

    def promise(self, classes: Mapping[str, SloClass]) -> None:
        """Replace the promises; the counters continue."""
        self._promises = {name: _promises(slo) for name, slo in classes.items()}
        self._quantiles = {name: slo.itl_quantile for name, slo in classes.items()}
        # Key class, promise, whether it was kept; created at once, so that all appear from 0 on.
        self._checks = {
            (name, kind, is_kept): self._all_checks.of(name, kind, "in_time" if is_kept else "late")
            for name, promises in self._promises.items()
            for kind in promises
            for is_kept in (True, False)
        }
        self._requests = {
            (name, verdict): self._all_requests.of(name, verdict)
            for name, promises in self._promises.items()
            for verdict in ("attained", "missed", "refused", "waived")
            if promises
        }
        self._seconds.clear()
        for name, promises in self._promises.items():
            for kind, promise_s in promises.items():
                self._seconds.of(name, kind).set(promise_s)

    def itl_quantile(self, slo_class: str) -> float:
        """Return the share of a request's gaps that its class's ITL SLO wants in time."""
        return self._quantiles[slo_class]

    def check(self, slo_class: str, kind: str, seconds: float) -> bool:
        """Whether a latency keeps its class's promise; counted if the class has one.

        Args:
            kind: "ttft", "itl" or "tpot".
        """
        promise_s = self._promises[slo_class].get(kind)
        if promise_s is None:
            return True
        is_kept = seconds <= promise_s
        self._checks[slo_class, kind, is_kept].inc()
        return is_kept

    def is_over(self, slo_class: str, kind: str, seconds: float) -> bool:
        """Whether a latency exceeds its class's promise; not counted."""
        promise_s = self._promises.get(slo_class, {}).get(kind)
        return promise_s is not None and seconds > promise_s

    def num_verdicts(self) -> dict[str, int]:
        """Return the number of requests for each verdict, over all classes; key as in `count`."""
        sums: Counter[str] = Counter()
        for (_, verdict), counter in self._requests.items():
            sums[verdict] += count_of(counter)
        return dict(sums)

    def count(self, slo_class: str, verdict: str) -> None:
        """Count a finished request: "attained", "missed", "refused" or "waived"."""
        if self._promises.get(slo_class):
            self._requests[slo_class, verdict].inc()


class RequestSlo:
    """Tracks whether one request attains its SLO.

    It does if it finishes, its TTFT and TPOT are in time, and so is the share of its gaps for which
    the ITL SLO is promised, as in `legato bench`.
    """

    def __init__(self, metrics: SloMetrics, slo_class: str) -> None:
        self._metrics = metrics
        self._class = slo_class
        self._is_waived = False
        self._is_late = False
        self._num_gaps = 0
        self._num_late_gaps = 0

    def waive(self) -> None:
        """Record that the request is served without a promise, as its client had allowed."""
        self._is_waived = True

    def first_token(self, ttft_s: float) -> None:
        if not self._is_waived:
            self._is_late = not self._metrics.check(self._class, "ttft", ttft_s)

    def no_first_token(self, waited_s: float) -> None:
        """Record a wait that ended without a token; it counts only if it is too long."""
        if self._metrics.is_over(self._class, "ttft", waited_s):
            self.first_token(waited_s)

    def token(self, gap_s: float) -> None:
        """Record the gap before the next token, or before several tokens that came at once."""
        if not self._is_waived:
            self._num_gaps += 1
            self._num_late_gaps += not self._metrics.check(self._class, "itl", gap_s)

    def pace(self, tpot_s: float) -> None:
        if not self._is_waived:
            self._is_late |= not self._metrics.check(self._class, "tpot", tpot_s)

    def end(self, reason: FinishReason) -> None:
        """Record the request's end; a request aborted by its client is not counted."""
        if self._is_waived:
            self._metrics.count(self._class, "waived")
        elif reason is FinishReason.REFUSED:
            self._metrics.count(self._class, "refused")
        elif reason is not FinishReason.ABORT:
            num_in_time = self._num_gaps - self._num_late_gaps
            quantile = self._metrics.itl_quantile(self._class)
            is_paced = num_in_time >= quantile * self._num_gaps
            is_attained = reason in _FINISHED and is_paced and not self._is_late
            self._metrics.count(self._class, "attained" if is_attained else "missed")


def _promises(slo: SloClass) -> dict[str, float]:
    """Return the promises of a class: key "ttft", "itl" or "tpot"; value seconds."""
    given = {"ttft": slo.ttft_s, "itl": slo.itl_s, "tpot": slo.tpot_s}
    return {kind: seconds for kind, seconds in given.items() if seconds is not None}
