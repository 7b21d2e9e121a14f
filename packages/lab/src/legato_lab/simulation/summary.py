"""Computes the figures of a run from its records."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from legato.core.slo import SloClass
from legato.observe.distribution import Distribution, distribution
from legato_lab.simulation.record import RequestRecord, Status, gaps_s


class Slos(msgspec.Struct, frozen=True, kw_only=True):
    """The promises of requests.

    Attributes:
        by_class: key the class; a limit that a class lacks is not taken from the default.
    """

    default: SloClass = SloClass()
    by_class: dict[str, SloClass] = {}

    @property
    def promise_anything(self) -> bool:
        """Whether there is any SLO that requests could attain."""
        return not all(slo.is_best_effort for slo in (self.default, *self.by_class.values()))

    def of(self, slo_class: str | None) -> SloClass:
        """Return the promises of a class."""
        return self.default if slo_class is None else self.by_class.get(slo_class, self.default)

    def are_met(self, record: RequestRecord) -> bool:
        """Whether a request attained its SLO.

        It did if it finished, its TTFT is within the TTFT SLO, its TPOT within the TPOT SLO, and
        the promised share of its gaps between tokens, 99 % or another, is within the ITL SLO.
        """
        slo = self.of(record.request.slo_class)
        return (
            record.status == "ok"
            and _is_within(record.ttft_s, slo.ttft_s)
            and _is_within(record.tpot_s, slo.tpot_s)
            and _share_within(record.itl_s, slo.itl_s) >= slo.itl_quantile
        )


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run. Distributions and token rates are of the requests that finished.

    Attributes:
        duration_s: from the first arrival to the last token.
        requests_per_s: that finished.
        total_tokens_per_s: of prompts and outputs.
        cached_share: share of the prompt tokens that were found in the cache; None if the server
            does not say.
        itl_s: over all gaps of all requests.
        attainment: fraction of all requests that attained their SLO; refused ones did not.
        goodput_per_s: requests a second that attained their SLO.
    """

    num_requests: dict[Status, int]
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: Distribution | None
    itl_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    attainment: float
    goodput_per_s: float
    cached_share: float | None = None


def summarize(records: Sequence[RequestRecord], slos: Slos) -> Summary:
    """Return the figures of all requests together."""
    return _summarize(records, slos, _duration_s(records))


def summarize_classes(records: Sequence[RequestRecord], slos: Slos) -> dict[str, Summary]:
    """Return the figures of each SLO class that requests name; key the class.

    Rates are over the whole run, so that they add up.
    """
    by_class: dict[str, list[RequestRecord]] = {}
    for record in records:
        if record.request.slo_class is not None:
            by_class.setdefault(record.request.slo_class, []).append(record)
    duration_s = _duration_s(records)
    return {name: _summarize(by_class[name], slos, duration_s) for name in sorted(by_class)}


def _summarize(records: Sequence[RequestRecord], slos: Slos, duration_s: float) -> Summary:
    finished = [record for record in records if record.status == "ok"]
    num_output = sum(record.num_tokens for record in finished)
    num_prompt = sum(record.request.num_prompt_tokens for record in finished)
    num_attained = sum(map(slos.are_met, records))

    def per_s(count: int) -> float:
        return count / duration_s if duration_s > 0.0 else 0.0

    return Summary(
        num_requests=dict(Counter(record.status for record in records)),
        duration_s=duration_s,
        requests_per_s=per_s(len(finished)),
        output_tokens_per_s=per_s(num_output),
        total_tokens_per_s=per_s(num_prompt + num_output),
        ttft_s=distribution(_known(record.ttft_s for record in finished)),
        itl_s=distribution(gaps_s(finished)),
        tpot_s=distribution(_known(record.tpot_s for record in finished)),
        e2e_s=distribution(_known(record.e2e_s for record in finished)),
        attainment=num_attained / len(records) if records else 0.0,
        goodput_per_s=per_s(num_attained),
        cached_share=_cached_share(finished),
    )


def _cached_share(finished: Sequence[RequestRecord]) -> float | None:
    told = [record for record in finished if record.num_cached_tokens is not None]
    num_prompt = sum(record.request.num_prompt_tokens for record in told)
    return sum(r.num_cached_tokens or 0 for r in told) / num_prompt if told else None


def _known(values: Iterable[float | None]) -> np.ndarray:
    return np.array([value for value in values if value is not None])


def _duration_s(records: Sequence[RequestRecord]) -> float:
    if not records:
        return 0.0
    start_s = min(record.request.arrival_s for record in records)
    return max(record.last_event_s for record in records) - start_s


def _is_within(value: float | None, slo: float | None) -> bool:
    return value is None or slo is None or value <= slo


def _share_within(values: np.ndarray, slo: float | None) -> float:
    return 1.0 if slo is None or values.size == 0 else float(np.mean(values <= slo))
