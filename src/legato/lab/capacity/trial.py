"""One trial of a search: what load it is, and what became of it."""

import msgspec

_WARM_UP = 1 / 6  # of what is measured: with 20 median end-to-end times, 3.3 of these


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests at a Poisson rate: first a warm-up, then a part that is measured.

    The load goes on until the end and is judged there: what is in flight then counts as far as it
    has come. To wait for it would be to measure a server whose load has gone.

    Attributes:
        measured_s: how long the measured part is.
        seed: of which requests come, and when.
    """

    rate_per_s: float
    measured_s: float
    seed: int = 0

    @property
    def warm_up_s(self) -> float:
        """When the measured part begins; requests that arrive before it are load and no more."""
        return _WARM_UP * self.measured_s

    @property
    def end_s(self) -> float:
        return self.warm_up_s + self.measured_s

    @property
    def num_requests(self) -> int:
        """With those of the warm-up."""
        return max(1, round(self.rate_per_s * self.end_s))


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the requests at one rate. All counts are of the measured part.

    Attributes:
        measured_s: as in the load, unless the trial was lost before.
        num_requests: that arrived.
        num_failed: those refused or failed.
        finished_per_s: requests that ended well; also such that arrived during the warm-up.
        p99_itl_s: over all gaps of all requests; None where there is none.
        longest_itl_s: the longest gap of any request.
        attainment: share of the requests that kept the ITL SLO, each by itself; one that failed
            did not.
        median_delay_s: scheduling delay; None where half of the requests had no first token.
        delay_growth_s: how much longer the median delay was in the second half than in the first.
        median_e2e_s: of requests that ended well; None where none did.
        broken: what was not kept; nothing if the rate is sustained.
    """

    load: Load
    measured_s: float
    num_requests: int
    num_failed: int
    finished_per_s: float
    p99_itl_s: float | None
    longest_itl_s: float | None
    attainment: float
    median_delay_s: float | None
    delay_growth_s: float | None
    median_e2e_s: float | None
    broken: list[str]

    @property
    def is_sustained(self) -> bool:
        return not self.broken

    @property
    def rate_per_s(self) -> float:
        return self.load.rate_per_s
