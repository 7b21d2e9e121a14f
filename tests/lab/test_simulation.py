"""Invariants of every simulated run."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.slo import SloClass
from legato.scheduler.step_costs import ROW_BOUNDS, StepCosts
from legato_lab.simulation.clients import SimulatedClients
from legato_lab.simulation.policies import parse_policy
from legato_lab.simulation.profiled_server import SimulatedServer
from legato_lab.simulation.profiles import Profile
from legato_lab.simulation.simulated_run import simulate
from legato_lab.simulation.workload import Workload, WorkloadRequest, with_poisson_arrivals
from legato_lab.workload.mixes import draw_mix
from tests.lab.simulated import CPU, serve

CHAT = with_poisson_arrivals(draw_mix("chat", 30, seed=0), 1.0, seed=0)
FAST = SchedulerConfig(itl_slo_s=0.1)


def test_one_seed_always_gives_the_same() -> None:
    assert serve("slo", FAST, CHAT, seed=1) == serve("slo", FAST, CHAT, seed=1)
    assert serve("slo", FAST, CHAT, seed=1) != serve("slo", FAST, CHAT, seed=2)


def test_a_request_alone_takes_what_its_steps_take() -> None:
    """A prompt of 600 tokens in steps of 512, then two tokens more, one step each."""
    costs = StepCosts(step_s=1.0, row_s=(0.0,) * (len(ROW_BOUNDS) + 1))
    server = SimulatedServer(
        profile=Profile(costs=costs),
        scheduler=SchedulerConfig(max_num_batched_tokens=512),
        overhead_s=0.25,
        truth_error=0.0,
        noise=0.0,
    )
    run = simulate(server, [WorkloadRequest(3.0, 600, 3)])
    assert run.records[0].token_times_s == [5.5, 6.75, 8.0]
    assert run.num_steps == 4


def test_what_one_step_brings_is_one_delivery() -> None:
    clients = SimulatedClients([WorkloadRequest(0.0, 10, 4)])
    [message] = clients.send(0.0)
    for now_s, token_ids in ((1.0, (5,)), (2.0, (6, 7, 8))):
        output = RequestOutput(
            request_id=message.request_id,
            new_token_ids=token_ids,
            finish_reason=FinishReason.LENGTH if now_s == 2.0 else None,
        )
        clients.receive([output], now_s)
    [record] = clients.records()
    assert record.token_times_s == [1.0, 2.0]
    assert record.num_tokens == 4
    assert record.tpot_s == pytest.approx(1 / 3)


def test_what_arrives_during_a_step_waits_for_the_next() -> None:
    costs = StepCosts(step_s=1.0, row_s=(0.0,) * (len(ROW_BOUNDS) + 1))
    server = SimulatedServer(
        profile=Profile(costs=costs),
        scheduler=SchedulerConfig(),
        overhead_s=0.0,
        truth_error=0.0,
        noise=0.0,
    )
    run = simulate(server, [WorkloadRequest(0.0, 10, 2), WorkloadRequest(0.5, 10, 1)])
    assert [record.token_times_s for record in run.records] == [[1.0, 2.0], [2.0]]


def test_progress_counts_every_request_once() -> None:
    server = SimulatedServer(profile=CPU, scheduler=SchedulerConfig())
    seen = []
    simulate(server, CHAT, lambda counts: seen.append(counts.copy()))
    assert seen
    assert all(counts.total() <= len(CHAT) for counts in seen)
    assert all(before["ok"] <= after["ok"] for before, after in pairwise(seen))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (WorkloadRequest(0.0, 10, 1, slo_class="gold"), "class 'gold'"),
        (WorkloadRequest(0.0, CPU.max_model_len, 1), "longer than max_model_len"),
    ],
)
def test_what_a_server_would_refuse_to_parse(request_: WorkloadRequest, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve("fixed", SchedulerConfig(), [request_])


@pytest.mark.parametrize("settings", [{"noise": -1.0}, {"truth_error": 1.0}, {"overhead_s": -1.0}])
def test_settings_out_of_range(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        SimulatedServer(profile=CPU, scheduler=SchedulerConfig(), **settings)  # type: ignore[arg-type]


MAX_MODEL_LEN = 256
_cost_s = st.floats(0.0, 1e-3)
_profiles = st.builds(
    Profile,
    costs=st.builds(
        StepCosts,
        step_s=st.floats(1e-3, 0.05),
        row_s=st.tuples(*[_cost_s] * (len(ROW_BOUNDS) + 1)),
        decode_row_s=_cost_s,
        decode_context_s=st.floats(0.0, 1e-5),
        chunk_s=_cost_s,
        area_s=st.floats(0.0, 1e-6),
        context_s=st.floats(0.0, 1e-5),
        sample_s=_cost_s,
    ),
    max_model_len=st.just(MAX_MODEL_LEN),
    kv_cache_tokens=st.integers(MAX_MODEL_LEN, 4 * MAX_MODEL_LEN),
)
_requests = st.builds(
    WorkloadRequest,
    arrival_s=st.floats(0.0, 2.0),
    num_prompt_tokens=st.integers(1, 200),
    num_output_tokens=st.integers(1, 56),
    slo_class=st.sampled_from([None, "interactive", "batch", "steady"]),
    priority=st.integers(-2, 2),
)
_workloads = st.lists(_requests, min_size=1, max_size=12).map(
    lambda requests: sorted(requests, key=lambda request: request.arrival_s)
)


@given(
    profile=_profiles,
    workload=_workloads,
    policy=st.sampled_from(["slo", "slo:32:lpm", "slo:fcfs", "fixed:64", "prefill-first:128:edf"]),
    shed_load=st.booleans(),
    max_num_seqs=st.integers(1, 8),
    noise=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 3),
)
def test_every_request_ends_once_with_its_tokens_in_order(
    profile: Profile,
    workload: Workload,
    policy: str,
    shed_load: bool,
    max_num_seqs: int,
    noise: float,
    seed: int,
) -> None:
    common = SchedulerConfig(
        itl_slo_s=0.06,
        ttft_slo_s=0.5,
        slo_classes={"steady": SloClass(tpot_s=0.08)},
        shed_load=shed_load,
        max_num_seqs=max_num_seqs,
    )
    server = SimulatedServer(
        profile=profile, scheduler=parse_policy(policy, common), noise=noise, seed=seed
    )
    run = simulate(server, workload)
    assert [record.request for record in run.records] == workload
    for record in run.records:
        times_s, request = record.token_times_s, record.request
        assert record.num_tokens == len(times_s)
        if record.status == "refused":
            assert shed_load
            assert not times_s
            assert record.retry_after_s is not None
            continue
        assert record.status == "ok"
        assert len(times_s) == request.num_output_tokens
        assert times_s[0] > request.arrival_s
        assert np.all(np.diff(times_s) > 0.0)
        assert times_s[-1] <= run.duration_s + 1e-6
    assert msgspec.json.decode(msgspec.json.encode(run), type=type(run)) == run
