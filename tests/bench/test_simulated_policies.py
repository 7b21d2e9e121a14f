"""What the policies are for, on seeded traffic: a change of the scheduler must not lose it."""

import numpy as np
import pytest

from legato.bench.load.record import RequestRecord
from legato.bench.workload.mixes import draw_mix
from legato.bench.workload.requests import Workload, WorkloadRequest, cut_to, with_poisson_arrivals
from legato.core.config import SchedulerConfig
from legato.core.slo import SloClass
from tests.bench.simulated import CPU, serve


def traffic(mix: str, num_requests: int, rate_per_s: float, seed: int = 0) -> Workload:
    drawn = cut_to(draw_mix(mix, num_requests, seed), CPU.max_model_len)
    return with_poisson_arrivals(drawn, rate_per_s, seed)


def p99_itl_s(records: list[RequestRecord]) -> float:
    return float(np.percentile(np.concatenate([record.itl_s for record in records]), 99))


def ttft_attainment(records: list[RequestRecord], ttft_slo_s: float) -> float:
    """Share of the requests whose first token came in time."""
    return float(np.mean([r.ttft_s is not None and r.ttft_s <= ttft_slo_s for r in records]))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_time_budget_keeps_the_itl_slo_where_a_fixed_one_does_not(seed: int) -> None:
    workload = traffic("mixed", 80, rate_per_s=0.5, seed=seed)
    common = SchedulerConfig(itl_slo_s=0.1)
    assert p99_itl_s(serve("slo", common, workload, seed)) <= 0.1
    assert p99_itl_s(serve("fixed:512", common, workload, seed)) > 0.2


def test_a_short_prompt_goes_before_long_ones_that_have_time() -> None:
    """Three long prompts are in prefill beside a running stream when a short one comes."""
    workload = [
        WorkloadRequest(0.0, 64, 400),
        *(WorkloadRequest(1.0, 7000, 16, slo_class="long") for _ in range(3)),
        WorkloadRequest(5.0, 64, 16),
    ]
    long = SloClass(itl_s=0.1, ttft_s=60.0)
    common = SchedulerConfig(itl_slo_s=0.1, ttft_slo_s=1.0, slo_classes={"long": long})
    by_deadline = serve("slo:edf", common, workload)[-1].ttft_s
    by_arrival = serve("slo:fcfs", common, workload)[-1].ttft_s
    assert by_deadline is not None
    assert by_arrival is not None
    assert by_deadline <= 1.0
    assert by_arrival > 10 * by_deadline


def test_batch_requests_take_what_is_left_and_end() -> None:
    workload = traffic("interactive+batch", 80, rate_per_s=0.3)
    records = serve("slo", SchedulerConfig(itl_slo_s=0.15, ttft_slo_s=3.0), workload)
    assert all(record.status == "ok" for record in records)
    interactive = [r for r in records if r.request.slo_class == "interactive"]
    assert 0 < len(interactive) < len(records)
    assert p99_itl_s(interactive) <= 0.15
    assert ttft_attainment(interactive, 3.0) >= 0.95


def test_shedding_load_keeps_the_promise_to_those_that_are_admitted() -> None:
    workload = traffic("mixed", 150, rate_per_s=1.5)
    records = {
        shed: serve(
            "slo", SchedulerConfig(itl_slo_s=0.15, ttft_slo_s=3.0, shed_load=shed), workload
        )
        for shed in (False, True)
    }
    refused = [record for record in records[True] if record.status == "refused"]
    admitted = [record for record in records[True] if record.status == "ok"]
    assert len(refused) + len(admitted) == len(workload)
    assert all(record.retry_after_s is not None and record.retry_after_s > 0 for record in refused)
    assert ttft_attainment(admitted, 3.0) >= 0.9
    assert ttft_attainment(records[False], 3.0) <= 0.5
