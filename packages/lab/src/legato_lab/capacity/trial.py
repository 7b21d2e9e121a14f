"""One trial of a search: its load and its result."""

import msgspec

_WARM_UP = 1 / 6  # share of the measured time; with 20 median end-to-end times, 3.3 of these


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests at a Poisson rate: first a warm-up, then a part that is measured.

    The load continues until the end and is judged there: requests in flight count as far as they
    have come. Waiting for them would measure a server without its load.

    Attributes:
        measured_s: length of the measured part.
        seed: for the choice of requests and their arrivals.
    """

    rate_per_s: float
    measured_s: float
    seed: int = 0

    @property
    def warm_up_s(self) -> float:
        """When the measured part begins; requests that arrive earlier are not measured."""
        return _WARM_UP * self.measured_s

    @property
    def end_s(self) -> float:
        return self.warm_up_s + self.measured_s

    @property
    def num_requests(self) -> int:
        """Including those of the warm-up."""
        return max(1, round(self.rate_per_s * self.end_s))


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the requests at one rate. All counts are of the measured part.

    Attributes:
        measured_s: as in the load, unless the trial was lost earlier.
        num_requests: that arrived.
        num_failed: that were refused or failed.
        finished_per_s: requests that ended well, including arrivals during the warm-up.
        p99_itl_s: over all gaps of all requests; None without gaps.
        longest_itl_s: the longest gap of any request.
        attainment: share of the requests that each kept the ITL SLO; failed ones did not.
        median_delay_s: scheduling delay; None if half of the requests had no first token.
        delay_growth_s: how much longer the median delay was in the second half than in the first.
        median_e2e_s: of requests that ended well; None if there were none.
        broken: the broken parts of the rule; empty if the rate is sustained.
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
