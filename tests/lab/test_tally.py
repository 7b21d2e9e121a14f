"""Figures without records: as those of all records, percentiles within 1 %."""

import random

import numpy as np
import pytest

from legato.core.slo import SloClass
from legato.observe.distribution import Distribution
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.summary import Slos, Summary, summarize, summarize_classes
from legato_lab.simulation.tally import Histogram, Tally
from legato_lab.simulation.workload import WorkloadRequest

SLOS = Slos(default=SloClass(itl_s=0.1, ttft_s=1.0), by_class={"batch": SloClass(ttft_s=0.2)})


def drawn(number: int, rng: random.Random) -> RequestRecord:
    arrival_s, num_tokens = 0.1 * number, rng.randint(1, 30)
    slo_class = rng.choice([None, "batch", "interactive"])
    request = WorkloadRequest(arrival_s, rng.randint(1, 500), num_tokens, slo_class)
    if rng.random() < 0.1:
        return RequestRecord(request=request, sent_s=arrival_s, status="refused", error="too many")
    gaps_s = [rng.lognormvariate(-3.0, 1.0) for _ in range(num_tokens)]
    return RequestRecord(
        request=request,
        sent_s=arrival_s,
        status="ok",
        token_times_s=(arrival_s + np.cumsum(gaps_s)).tolist(),
        num_tokens=num_tokens,
        num_cached_tokens=request.num_prompt_tokens // 2,
    )


def assert_alike(tallied: Summary, exact: Summary) -> None:
    for name in Summary.__struct_fields__:
        found, expected = getattr(tallied, name), getattr(exact, name)
        if isinstance(expected, Distribution):
            for part in Distribution.__struct_fields__:
                rel = 1e-9 if part in ("mean", "max") else 0.011
                assert getattr(found, part) == pytest.approx(getattr(expected, part), rel=rel)
        else:
            assert found == pytest.approx(expected) if expected else not found


def test_a_tally_says_what_the_records_say() -> None:
    rng = random.Random(0)
    records = [drawn(number, rng) for number in range(3000)]
    tally = Tally(SLOS)
    for record in records:
        tally.add(record)
    assert_alike(tally.summary(), summarize(records, SLOS))
    exact = summarize_classes(records, SLOS)
    assert tally.by_class().keys() == exact.keys()
    for name, summary in tally.by_class().items():
        assert_alike(summary, exact[name])
    assert tally.failures == {"too many": sum(r.status == "refused" for r in records)}


def test_of_nothing_there_is_no_figure() -> None:
    assert Histogram().distribution() is None
    assert_alike(Tally(SLOS).summary(), summarize([], SLOS))


def test_what_is_out_of_all_bins_is_in_the_last_ones() -> None:
    histogram = Histogram()
    histogram.add([0.0, 0.0, 1e9])
    found = histogram.distribution()
    assert found is not None
    assert (found.p50, found.max) == (1e-6, 1e9)
