"""Whether promises were kept, class by class."""

from collections import Counter
from collections.abc import Callable, Mapping

from legato.core.outputs import FinishReason
from legato.core.slo import SloClass
from legato.core.stats import KeptPromise
from legato.observe.metrics.registry import MetricRegistry, count_of

_FINISHED = (FinishReason.STOP, FinishReason.LENGTH)


class SloMetrics:
    """Counts what became of the promises, and shows them.

    Args:
        classes: key the class's name.
        kept: what is made of promises on gaps; key the class's name; asked once a scrape.
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
            "Share of a request's gaps between tokens that `slo_seconds` is promised for.",
            "slo_class",
            read=lambda: {(name,): promise.quantile for name, promise in kept().items()},
            own=True,
        )
        promises.read_gauges(
            "slo_delivered_seconds",
            "What so large a share of all gaps of the last minute was within, as tokens were "
            "handed to clients; the promise is kept where it is at most `slo_seconds`.",
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
            "Promises that fell due, `in_time` or `late`: first tokens against the TTFT SLO, each "
            "gap to what comes next (a token, or several at once) against the ITL SLO, requests' "
            "mean times a token against the TPOT SLO.",
            "slo_class",
            "slo",
            "verdict",
            own=True,
        )
        self._all_requests = promises.counter(
            "slo_requests",
            "Requests that `attained` what they were promised (as many gaps in time as the "
            "ITL SLO is for, 99 % if it does not say, as in `legato bench`), `missed` it, were "
            "`refused`, or `waived` it (`allow_best_effort`); those whose client left are not "
            "counted.",
            "slo_class",
            "verdict",
            own=True,
        )
        self.promise(classes)

    def promise(self, classes: Mapping[str, SloClass]) -> None:
        """Go by these promises from now on; counts go on."""
        self._promises = {name: _promises(slo) for name, slo in classes.items()}
        self._quantiles = {name: slo.itl_quantile for name, slo in classes.items()}
        # Key class, promise, whether it was kept; made at once, so that all are shown from 0 on.
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
            for kind, promised_s in promises.items():
                self._seconds.of(name, kind).set(promised_s)

    def itl_quantile(self, slo_class: str) -> float:
        """Share of a request's gaps that are in time where it attains its class's ITL SLO."""
        return self._quantiles[slo_class]

    def check(self, slo_class: str, kind: str, seconds: float) -> bool:
        """Whether a latency is within what its class promises, if it does; counted if so.

        Args:
            kind: "ttft", "itl" or "tpot".
        """
        promised_s = self._promises[slo_class].get(kind)
        if promised_s is None:
            return True
        is_kept = seconds <= promised_s
        self._checks[slo_class, kind, is_kept].inc()
        return is_kept

    def is_over(self, slo_class: str, kind: str, seconds: float) -> bool:
        """Whether so much time is more than what is promised; not counted."""
        promised_s = self._promises.get(slo_class, {}).get(kind)
        return promised_s is not None and seconds > promised_s

    def num_verdicts(self) -> dict[str, int]:
        """Requests of all classes, by what became of their promises; key as in `count`."""
        sums: Counter[str] = Counter()
        for (_, verdict), counter in self._requests.items():
            sums[verdict] += count_of(counter)
        return dict(sums)

    def count(self, slo_class: str, verdict: str) -> None:
        """A request is over: "attained", "missed", "refused" or "waived"."""
        if self._promises.get(slo_class):
            self._requests[slo_class, verdict].inc()


class RequestSlo:
    """What becomes of the promises to one request.

    A request attains its SLO if it finishes, its TTFT and TPOT are in time, and so are as many of
    its gaps as the ITL SLO is for, as in `legato bench`.
    """

    def __init__(self, metrics: SloMetrics, slo_class: str) -> None:
        self._metrics = metrics
        self._class = slo_class
        self._is_waived = False
        self._is_late = False
        self._num_gaps = 0
        self._num_late_gaps = 0

    def waive(self) -> None:
        """It is served without a promise, as its client had allowed."""
        self._is_waived = True

    def first_token(self, ttft_s: float) -> None:
        if not self._is_waived:
            self._is_late = not self._metrics.check(self._class, "ttft", ttft_s)

    def no_first_token(self, waited_s: float) -> None:
        """Its client went away, or it failed, after so long; counts only where that is too long."""
        if self._metrics.is_over(self._class, "ttft", waited_s):
            self.first_token(waited_s)

    def token(self, gap_s: float) -> None:
        """Its next token has come so long after the last, perhaps with others: one gap."""
        if not self._is_waived:
            self._num_gaps += 1
            self._num_late_gaps += not self._metrics.check(self._class, "itl", gap_s)

    def pace(self, tpot_s: float) -> None:
        if not self._is_waived:
            self._is_late |= not self._metrics.check(self._class, "tpot", tpot_s)

    def end(self, reason: FinishReason) -> None:
        """It is over; whose client went away is not counted."""
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
    """Key "ttft", "itl" or "tpot"; value seconds."""
    given = {"ttft": slo.ttft_s, "itl": slo.itl_s, "tpot": slo.tpot_s}
    return {kind: seconds for kind, seconds in given.items() if seconds is not None}
