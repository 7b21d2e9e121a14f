"""Capacities of simulated servers, beside what their costs alone say."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.config import SchedulerConfig
from legato.scheduler.step_costs import ROW_BOUNDS, StepCosts
from legato.scheduler.step_shape import chunk_area
from legato_lab.capacity.search import Capacity, SearchSettings, TrialLength
from legato_lab.load.simulated_sessions import simulate_search
from legato_lab.simulation.policies import parse_policy
from legato_lab.simulation.profiled_server import SimulatedServer
from legato_lab.simulation.profiles import Profile
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.simulated_run import simulate
from legato_lab.simulation.workload import Workload, WorkloadRequest
from legato_lab.workload.choice import WorkloadChoice
from tests.lab.simulated import CPU
from tests.lab.workload_file import write_workload
from tests.profiles import examples

BUDGET = 512
OVERHEAD_S = 0.5e-3


@st.composite
def costs_of_steps(draw: st.DrawFn) -> StepCosts:
    """Of a machine that takes one or two prompts of 1,000 tokens a second."""

    def up_to(most_s: float) -> float:
        return draw(st.floats(0.0, most_s))

    return StepCosts(
        step_s=up_to(50e-3),
        row_s=tuple(draw(st.floats(0.2e-3, 1e-3)) for _ in (*ROW_BOUNDS, None)),
        decode_row_s=up_to(5e-3),
        decode_context_s=up_to(5e-6),
        chunk_s=up_to(10e-3),
        area_s=up_to(0.2e-6),
        context_s=up_to(20e-6),
        sample_s=up_to(1e-3),
    )


def limit_per_s(costs: StepCosts, workload: Workload) -> float:
    """What no scheduler can exceed: every token in a step that is filled at its best, every prompt
    in one chunk, and nothing that waits."""
    sizes = range(1, BUDGET + 1)
    token_s = min((costs.step_s + OVERHEAD_S + costs.rows_s(size)) / size for size in sizes)
    return len(workload) / sum(_least_s(costs, request, token_s) for request in workload)


def _least_s(costs: StepCosts, request: WorkloadRequest, token_s: float) -> float:
    num_prompt, num_decodes = request.num_prompt_tokens, request.num_output_tokens - 1
    contexts = sum(num_prompt + place for place in range(1, num_decodes + 1))
    return (
        (num_prompt + num_decodes) * token_s
        + num_decodes * costs.decode_row_s
        + contexts * costs.decode_context_s
        + costs.chunk_s
        + costs.area_s * chunk_area(0, num_prompt)
        + costs.context_s * num_prompt
        + costs.sample_s * request.num_output_tokens
    )


def requests_of_a_source() -> st.SearchStrategy[Workload]:
    lengths = st.builds(WorkloadRequest, st.just(0.0), st.integers(300, 1500), st.integers(1, 12))
    return st.lists(lengths, min_size=1, max_size=4)


@examples(2)
@given(
    costs_of_steps(),
    requests_of_a_source(),
    st.sampled_from(["slo", "fixed:512", "fixed:128:edf", "prefill-first:512"]),
    st.sampled_from([0.2, 5.0]),
)
def test_no_capacity_is_above_what_the_costs_allow(
    tmp_path_factory: pytest.TempPathFactory,
    costs: StepCosts,
    workload: Workload,
    policy: str,
    itl_slo_s: float,
) -> None:
    path = tmp_path_factory.mktemp("limit") / "workload.jsonl"
    write_workload(path, workload)
    common = SchedulerConfig(itl_slo_s=itl_slo_s, max_num_batched_tokens=BUDGET)
    server = SimulatedServer(
        profile=Profile(costs=costs),
        scheduler=parse_policy(policy, common),
        overhead_s=OVERHEAD_S,
        truth_error=0.0,
        noise=0.0,
    )
    limit = limit_per_s(costs, workload)
    settings = SearchSettings(itl_slo_s=itl_slo_s, start_rate_per_s=1.02 * limit, precision=0.02)
    found = simulate_search(server, WorkloadChoice(source=str(path)), settings)
    assert max(found.rates_per_s) <= limit


@pytest.fixture(scope="module")
def server() -> SimulatedServer:
    return SimulatedServer(profile=CPU, scheduler=SchedulerConfig(itl_slo_s=0.15))


def capacity(server: SimulatedServer, least_s: float) -> Capacity:
    settings = SearchSettings(
        itl_slo_s=0.15, length=TrialLength(least_s=least_s), start_rate_per_s=2.5, num_seeds=2
    )
    choice = WorkloadChoice(source="prompt p50=600 p99=3000, output p50=6 p99=20")
    return simulate_search(server, choice, settings)


def test_twice_as_many_requests_find_the_same(server: SimulatedServer) -> None:
    once, twice = capacity(server, 120.0), capacity(server, 240.0)
    assert twice.best[0].num_requests == pytest.approx(2 * once.best[0].num_requests, rel=0.1)
    assert twice.rate_per_s == pytest.approx(once.rate_per_s, rel=0.05)


def test_a_run_can_be_ended_early(server: SimulatedServer) -> None:
    requests = [WorkloadRequest(0.5 * place, 100, 20) for place in range(200)]
    looks_s: list[float] = []

    def stop(now_s: float, records: Sequence[RequestRecord]) -> bool:
        looks_s.append(now_s)
        assert all(record.request.arrival_s <= now_s for record in records)
        return len(looks_s) == 2

    stopped = simulate(server, requests, stop_when=stop)
    assert stopped.duration_s == looks_s[1]
    ended = simulate(server, requests, until_s=30.0)
    assert 30.0 <= ended.duration_s < 30.5
    assert len(ended.records) == 60
    assert {record.status for record in ended.records} == {"ok", "cancelled"}
    assert ended.records[0] == simulate(server, requests).records[0]
