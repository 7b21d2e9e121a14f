"""Between tenants: a flood takes no more than its share from another tenant."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from legato.core.outputs import FinishReason
from legato.core.tenant import DEFAULT_TENANT
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_time import StepTimeModel
from legato.scheduler.tenants import (
    _CREDIT_S,
    _MOST_KNOWN,
    _MOST_SHOWN,
    _RECENT_S,
    OTHER_TENANTS,
    Tenants,
)
from tests.profiles import examples
from tests.scheduler.harness import Harness
from tests.scheduler.probes import EPYC
from tests.scheduler.step_times import calibrate, truth

MACHINE = StepCosts(
    step_s=0.01, row_s=(0.001,) * 5, decode_row_s=0.001, decode_context_s=1e-5, area_s=1e-6
)


def harness_of(**settings: Any) -> Harness:
    """With a model of steps that is right."""
    return Harness(
        **{"num_blocks": 2000, "max_model_len": 1000, **settings},
        step_time=StepTimeModel(calibrate(MACHINE, 1000)),
        step_time_s=truth(MACHINE, lambda: 1.0),
    )


def service_s(harness: Harness) -> dict[str, float]:
    return {tenant.name: tenant.service_s for tenant in harness.scheduler.stats.tenants}


class TenantsMachine(RuleBasedStateMachine):
    """Who waits, is served and goes away, in any order."""

    @initialize(weight=st.sampled_from([0.5, 1.0, 3.0]))
    def start(self, weight: float) -> None:
        self.tenants = Tenants({"a": weight})
        self.weights = {"a": weight}
        self.charged = dict.fromkeys("abc", 0.0)

    @rule(name=st.sampled_from("abc"))
    def come(self, name: str) -> None:
        tenant = self.tenants.on_request(name, 0.0)
        assert tenant.counter_s >= self.tenants._reached_s - _CREDIT_S / tenant.weight or (
            tenant.num_waiting
        )
        tenant.count(waiting=1)

    @rule(name=st.sampled_from("abc"))
    def go(self, name: str) -> None:
        tenant = self.tenants.on_request(name, 0.0)
        if tenant.num_waiting:
            tenant.count(waiting=-1)

    @rule(name=st.sampled_from("abc"), seconds=st.floats(0.0, 20.0))
    def serve(self, name: str, seconds: float) -> None:
        tenant = self.tenants.on_request(name, 0.0)
        before_s, reached_s = tenant.counter_s, self.tenants._reached_s
        tenant.charge(seconds)
        self.charged[name] += seconds
        weight = self.weights.get(name, 1.0)
        assert tenant.counter_s == pytest.approx(before_s + seconds / weight)
        self.tenants.raise_floor(tenant.counter_s)
        assert self.tenants._reached_s == max(reached_s, tenant.counter_s)

    @invariant()
    def what_is_told_is_what_was_charged(self) -> None:
        if hasattr(self, "tenants"):
            for told in self.tenants.stats:
                assert told.service_s == pytest.approx(self.charged[told.name])


TestTenantsMachine = TenantsMachine.TestCase
TestTenantsMachine.settings = examples(50, stateful_step_count=30)


@given(
    lens=st.tuples(st.integers(1, 300), st.integers(1, 300)),
    outputs=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    weight=st.sampled_from([1.0, 2.0, 5.0]),
    depth=st.integers(1, 2),
    max_num_seqs=st.integers(2, 8),
)
@examples(10)
def test_two_that_always_have_something_waiting_get_the_same_by_weight(
    lens: tuple[int, int],
    outputs: tuple[int, int],
    weight: float,
    depth: int,
    max_num_seqs: int,
) -> None:
    """VTC's theorem, in time: however long it goes on, counters differ by a bounded amount. The
    bound: the steps that compute all that can run of one tenant once it has been admitted, which
    others cannot take back."""
    harness = harness_of(
        tenant_weights={"a": weight}, max_num_seqs=max_num_seqs, budget=64, depth=depth
    )
    num_added = {"a": 0, "b": 0}
    gaps_s = []
    for _ in range(250):
        for name, prompt_len, max_tokens in zip("ab", lens, outputs, strict=True):
            while num_added[name] < 4 or harness.scheduler._tenants.of(name).num_waiting < 4:
                harness.add(f"{name}{num_added[name]}", prompt_len, max_tokens, tenant=name)
                num_added[name] += 1
        harness.step()
        served_s = service_s(harness)
        gaps_s.append(abs(served_s["a"] / weight - served_s["b"]))
    longest_s = max(
        MACHINE.step_s * (prompt_len + max_tokens) + 0.01 * prompt_len + 0.02 * max_tokens
        for prompt_len, max_tokens in zip(lens, outputs, strict=True)
    )
    assert max(gaps_s) <= (max_num_seqs + 1) * longest_s
    assert min(service_s(harness).values()) > 0.0


@given(
    lens=st.lists(st.integers(1, 200), min_size=1, max_size=30),
    settings=st.sampled_from([{}, {"itl_slo_s": 0.2}, {"ttft_slo_s": 0.5}, {"max_waiting": 5}]),
)
@examples(40)
def test_with_one_tenant_nothing_changes(lens: list[int], settings: dict[str, Any]) -> None:
    plans = []
    for tenant in DEFAULT_TENANT, "one":
        harness = harness_of(**settings)
        for i, prompt_len in enumerate(lens):
            harness.add(str(i), prompt_len, 3, tenant=tenant)
            harness.step()
        harness.drain()
        plans.append([(plan.chunks, plan.preempted, plan.held_by) for plan in harness.plans])
    assert plans[0] == plans[1]


def flooded(light_s: float = 0.0, num_output: int = 500, **settings: Any) -> Harness:
    """`light` has sent a request, and `flood` has taken all that it could get."""
    harness = harness_of(**{"max_num_seqs": 8, "budget": 64, **settings})
    harness.add("first", 4, 1, tenant="light")
    harness.drain()
    harness.clock.advance_to(harness.clock() + light_s)
    for i in range(40):
        harness.add(f"flood {i}", 10, num_output, tenant="flood")
    for _ in range(20):
        harness.step()
    return harness


def test_a_place_is_kept_for_who_may_come_again() -> None:
    harness = flooded()
    assert harness.scheduler.stats.num_running == 6
    assert harness.plans[-1].held_by == "tenants"
    for i in range(2):
        harness.add(f"light {i}", 10, 2, tenant="light")
    harness.step()
    assert set(harness.plans[-1].admitted) == {"light 0", "light 1"}


def test_no_place_is_kept_for_who_is_gone() -> None:
    harness = flooded(light_s=_RECENT_S + 1.0)
    assert harness.scheduler.stats.num_running == 8


def test_steps_have_room_for_who_may_come_again() -> None:
    """With a promise, streams could take all of each step."""
    harness = flooded(itl_slo_s=0.06, max_num_seqs=30, num_output=100)
    alone = harness_of(itl_slo_s=0.06, max_num_seqs=30, budget=64)
    for i in range(40):
        alone.add(str(i), 10, 100)
    for _ in range(20):
        alone.step()
    assert 1 < harness.scheduler.stats.num_running < 0.7 * alone.scheduler.stats.num_running


def test_a_prompt_goes_before_those_of_a_flood() -> None:
    harness = flooded(max_num_seqs=64)
    for i in range(20):
        harness.add(f"long {i}", 400, 1, tenant="flood")
    for _ in range(3):
        harness.step()
    harness.add("mine", 100, 1, tenant="light")
    while not harness.tokens["mine"]:
        harness.step()
        prefill = [chunk for chunk in harness.plans[-1].chunks if chunk.kind == "prefill"]
        assert prefill[0].request_id == "mine"


def prefills(harness: Harness) -> list[str]:
    """Whose prompts the last step held; a request's name begins with its tenant's."""
    chunks = harness.plans[-1].chunks
    return [chunk.request_id.split()[0] for chunk in chunks if chunk.kind == "prefill"]


def test_a_prompt_of_who_is_owed_service_shares_no_step_with_a_flood() -> None:
    """Its first token would come later by what the flood's prompts take of its last step."""
    harness = flooded(max_num_seqs=64, budget=128, num_blocks=20_000)
    for i in range(20):
        harness.add(f"flood long {i}", 400, 1, tenant="flood")
    harness.step()
    assert set(prefills(harness)) == {"flood"}
    harness.add("light mine", 100, 1, tenant="light")
    held = []
    while not harness.tokens["light mine"]:
        harness.step()
        held.append(prefills(harness))
    assert held == [["light"], ["light"]]
    harness.step()
    assert set(prefills(harness)) == {"flood"}


def test_a_flood_fills_half_of_a_step_while_others_may_come() -> None:
    """A new request waits for the step that has begun."""

    def longest_s(light_s: float) -> float:
        harness = harness_of(itl_slo_s=0.1, max_num_seqs=30, budget=500)
        harness.add("light", 4, 1, tenant="light")
        harness.drain()
        harness.clock.advance_to(harness.clock() + light_s)
        harness.add("flood stream", 4, 200, tenant="flood")
        for i in range(20):
            harness.add(f"flood {i}", 400, 1, tenant="flood")
        for _ in range(3):
            harness.step()
        plans = []
        for _ in range(10):
            harness.step()
            plans.append(harness.plans[-1])
            assert prefills(harness)
        return max(plan.predicted_s or 0.0 for plan in plans)

    assert longest_s(0.0) <= 0.05
    assert longest_s(_RECENT_S + 1.0) > 0.06


@given(
    lens=st.lists(st.integers(1, 150), min_size=2, max_size=6),
    pauses=st.lists(st.integers(0, 6), min_size=2, max_size=6),
    itl_slo_s=st.sampled_from([None, 0.06, 0.2]),
)
@examples(15)
def test_a_flood_gets_all_that_others_leave_and_its_share_at_least(
    lens: list[int], pauses: list[int], itl_slo_s: float | None
) -> None:
    """Prompts of a tenant that is owed service have steps to themselves, but pay for them: it is
    not owed more for long. So a flood is never idle while no other tenant wants anything, and
    tenants that want all they can get leave it its share."""
    harness = harness_of(budget=64, max_num_seqs=8, itl_slo_s=itl_slo_s)
    names = [f"light-{i}" for i in range(len(lens))]
    ids = itertools.count()
    due = dict.fromkeys(names, 0)
    for step in range(300):
        while harness.scheduler.stats.num_waiting < 4 + len(names):
            harness.add(f"flood {next(ids)}", 100, 5, tenant="flood")
        for name, prompt_len, pause in zip(names, lens, itertools.cycle(pauses), strict=False):
            if due[name] <= step:
                due[name] = step + 1 + pause
                harness.add(f"{name} {next(ids)}", prompt_len, 2, tenant=name)
        harness.step()
        assert harness.plans[-1].chunks
    served_s = service_s(harness)
    share_s = sum(served_s.values()) / (1 + len(names))
    longest_s = 8 * (MACHINE.step_s * 155 + 0.01 * 150)
    assert served_s["flood"] >= min(share_s, 300 * MACHINE.step_s) - longest_s
    assert served_s["flood"] > 0.0


def test_a_burst_is_owed_no_more_than_its_credit() -> None:
    """A tenant that has been away for long comes back with more work: then both take turns."""
    harness = harness_of(budget=64, max_num_seqs=4)
    harness.add("first", 4, 1, tenant="burst")
    harness.drain()
    ids = itertools.count()

    def serve(until_s: float, *names: str) -> dict[str, float]:
        while harness.clock() < until_s:
            for name in names:
                while harness.scheduler._tenants.on_request(name, harness.clock()).num_waiting < 4:
                    harness.add(str(next(ids)), 60, 1, tenant=name)
            harness.step()
        return service_s(harness)

    before = serve(4 * _CREDIT_S, "flood")
    after = serve(10 * _CREDIT_S, "flood", "burst")
    more_s = {name: after[name] - before[name] for name in after}
    assert 0.5 * _CREDIT_S < more_s["burst"] - more_s["flood"] < 1.5 * _CREDIT_S


def test_a_full_queue_has_room_for_the_tenant_with_less_in_it() -> None:
    harness = harness_of(max_waiting=8, max_num_seqs=1, budget=16)
    for i in range(12):
        harness.add(f"flood {i}", 10, 100, tenant="flood")
    assert harness.finish_reasons["flood 11"] == [FinishReason.REFUSED]
    for i in range(6):
        harness.add(f"light {i}", 10, 1, tenant="light")
    refused = [name for name, reasons in harness.finish_reasons.items() if reasons]
    assert refused == [*(f"flood {i}" for i in range(4, 12)), "light 4", "light 5"]
    assert harness.scheduler.stats.num_waiting == 8
    told = {tenant.name: tenant.num_refused for tenant in harness.scheduler.stats.tenants}
    assert told == {"flood": 8, "light": 2}


def test_who_has_most_running_gives_up_its_blocks() -> None:
    harness = harness_of(num_blocks=30, max_model_len=100, admission_optimism=1.0, budget=64)
    harness.add("light", 10, 60, tenant="light")
    harness.step()
    for i in range(5):
        harness.add(f"flood {i}", 10, 60, tenant="flood")
    harness.drain()
    preempted = {name for plan in harness.plans for name in plan.preempted}
    assert preempted
    assert all(name.startswith("flood") for name in preempted)


def test_tenants_are_forgotten_and_told_of_in_bounded_number() -> None:
    harness = harness_of()
    for i in range(_MOST_KNOWN + 50):
        harness.add(str(i), 1, 1, tenant=f"t{i}")
        harness.drain()
    assert len(harness.scheduler._tenants) <= _MOST_KNOWN
    told = [tenant.name for tenant in harness.scheduler.stats.tenants]
    assert told == [*(f"t{i}" for i in range(_MOST_SHOWN)), OTHER_TENANTS]


def wait_beside_flood_s(num_streams: int, weight: float, slo_class: str) -> float:
    """How long a short prompt of b waits beside a flood of a, and long streams of c."""
    harness = Harness(
        budget=512,
        max_num_seqs=16,
        num_blocks=20_000,
        block_size=16,
        max_model_len=4096,
        step_time=StepTimeModel(calibrate(EPYC, 4096)),
        step_time_s=truth(EPYC, lambda: 1.0),
        itl_slo_s=0.2,
        max_wait_s=2.0,
        tenant_weights={"c": weight},
    )
    harness.add("known", 50, 1, tenant="b")
    for number in range(num_streams):
        harness.add(f"long {number}", 20, 2000, tenant="c", slo_class=slo_class)
    harness.step()
    for number in range(40):
        harness.add(f"flood {number}", 400, 100, tenant="a")
    while harness.clock() < 4.0:
        harness.step()
    harness.add("short", 50, 5, tenant="b")
    begun_s = harness.clock()
    while not harness.tokens["short"]:
        harness.step()
    return harness.clock() - begun_s


def test_best_effort_streams_do_not_let_a_flood_hold_up_another_tenant() -> None:
    """Seen: three of them counted as thirty, so the flood ran less than another, and went first."""
    assert wait_beside_flood_s(3, 1.0, "batch") < 0.5


@pytest.mark.parametrize("weight", [1.0, 0.1])
def test_nobody_waits_longer_for_a_flood_that_runs_less_than_a_third_tenant(weight: float) -> None:
    """Seen: a's oldest prompt went first while it ran 14 requests, since c ran more by weight."""
    assert wait_beside_flood_s(6, weight, "interactive") < 2.0 + 0.5
