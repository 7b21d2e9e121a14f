"""Every request gets its first token, under any further load."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from legato.core.request import Request
from legato.core.slo import SloClass
from legato.kv.state_slots import StateSlots
from legato.scheduler.admission import _BEST_EFFORT_WAITS
from legato.scheduler.budget import MIN_CHUNK
from legato.scheduler.order import _S_PER_TOKEN, LATE_SHARE, ORDERS
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_time import StepTimeModel
from legato.scheduler.tenants import BEST_EFFORT
from tests.profiles import examples
from tests.scheduler.harness import Harness
from tests.scheduler.step_times import calibrate, truth

STEP_S = 0.25
CONSTANT = StepCosts(step_s=STEP_S, row_s=(0.0,) * 5)
CLASSES = {
    "hurried": SloClass(ttft_s=2.0),
    "usual": SloClass(ttft_s=4.0),
    "patient": SloClass(ttft_s=20.0),
    "paced": SloClass(itl_s=5.0),
}


class BusyHarness(Harness):
    """`num_waiting` copies of one newcomer wait at any time, of its tenants in turn."""

    def __init__(
        self,
        newcomer: dict[str, Any],
        num_waiting: int,
        machine: StepCosts = CONSTANT,
        *,
        num_blocks: int = 5000,
        max_model_len: int = 2000,
        tenants: Sequence[str] = ("default",),
        **settings: Any,
    ) -> None:
        super().__init__(
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            step_time=StepTimeModel(calibrate(machine, 2000)),
            step_time_s=truth(machine, lambda: 1.0),
            **settings,
        )
        self.newcomer = newcomer
        self.num_newcomers_waiting = num_waiting
        self.ids = itertools.count()
        self.tenants = itertools.cycle(tenants)

    def refill(self) -> None:
        num_waiting = sum(name != "R" for name in self.scheduler._queues._waiting)
        for _ in range(self.num_newcomers_waiting - num_waiting):
            newcomer = {"tenant": next(self.tenants), **self.newcomer}
            self.add(f"new {next(self.ids)}", **newcomer)

    def warm_up(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.refill()
            self.step()

    def await_first_token(self, request_id: str, within_s: float) -> None:
        began_s = self.clock()
        while not self.token_times_s[request_id]:
            self.refill()
            self.step()
            assert self.clock() - began_s <= within_s, "starved"


def newcomers() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "prompt_len": st.integers(1, 60),
            "max_tokens": st.integers(1, 6),
            "slo_class": st.sampled_from([*CLASSES]),
            "priority": st.integers(-1, 0),
        }
    )


def num_service_steps(prompt_len: int, max_tokens: int, config: Any) -> int:
    """Steps that a request takes alone, beside as many decodes as there can be."""
    prefill_tokens = config.max_num_batched_tokens - config.max_num_seqs
    return math.ceil(prompt_len / prefill_tokens) + max_tokens


@pytest.mark.parametrize("order", ORDERS)
@given(
    newcomer=newcomers(),
    num_waiting=st.integers(1, 5),
    prompt_len=st.integers(1, 600),
    slo_class=st.sampled_from([*CLASSES]),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(16, 64),
)
@examples(40)
def test_a_rank_is_a_delay_and_no_more(
    order: str,
    newcomer: dict[str, Any],
    num_waiting: int,
    prompt_len: int,
    slo_class: str,
    max_num_seqs: int,
    budget: int,
) -> None:
    """The bound: from a time on that its rank tells, all newcomers go behind the request; those who
    came before are served one after the other, and then it is. Where it is late, or they are, it
    has a quarter of the prefill."""
    harness = BusyHarness(
        newcomer,
        num_waiting,
        prefill_order=order,
        slo_classes=CLASSES,
        max_num_seqs=max_num_seqs,
        budget=budget,
    )
    harness.warm_up(5)
    harness.add("R", prompt_len, 1, slo_class=slo_class)
    request = harness.scheduler._queues.get("R")
    assert request is not None
    num_before = num_waiting + 1 + max_num_seqs
    service = num_before * num_service_steps(
        newcomer["prompt_len"], newcomer["max_tokens"], harness.config
    ) + num_service_steps(prompt_len, 1, harness.config)
    if order in ("edf", "slowdown"):
        service /= LATE_SHARE
        service *= num_service_steps(newcomer["prompt_len"], newcomer["max_tokens"], harness.config)
    within_s = delay_s(request, harness) + STEP_S * (1 + service)
    harness.await_first_token("R", within_s)


@given(
    newcomer_len=st.integers(1, 400),
    num_waiting=st.integers(1, 5),
    prompt_len=st.integers(1, 600),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(16, 64),
)
@examples(40)
def test_a_cached_prompt_is_a_head_start_and_no_more(
    newcomer_len: int, num_waiting: int, prompt_len: int, max_num_seqs: int, budget: int
) -> None:
    """The bound: newcomers go before the request as long as their hits are worth."""
    newcomer = {"prompt": (1,) * newcomer_len, "max_tokens": 2}
    harness = BusyHarness(
        newcomer, num_waiting, prefill_order="lpm", max_num_seqs=max_num_seqs, budget=budget
    )
    harness.warm_up(20)
    harness.add("R", prompt_len, 1)
    num_before = num_waiting + 1 + max_num_seqs
    service = num_before * num_service_steps(newcomer_len, 2, harness.config)
    service += num_service_steps(prompt_len, 1, harness.config)
    harness.await_first_token("R", _S_PER_TOKEN * newcomer_len + STEP_S * (1 + service))


def delay_s(request: Request, harness: BusyHarness) -> float:
    """How long newcomers can go before the request."""
    newest = next(iter(harness.added))
    slo = harness.config.classes[harness.newcomer["slo_class"]]
    newcomer = Request(harness.added[newest], slo, harness.max_model_len)
    rank = harness.scheduler._queues.rank
    head_start_s = rank(newcomer)[1] - newcomer.message.arrival_time_s
    return max(0.0, rank(request)[1] - request.message.arrival_time_s - head_start_s)


@given(
    newcomer=newcomers(),
    tenants=st.sampled_from([("default",), ("a", "b"), ("default", "a", "b")]),
    prompt_len=st.integers(1, 200),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(16, 64),
)
@example(
    newcomer={"prompt_len": 60, "max_tokens": 6, "slo_class": "hurried", "priority": -1},
    tenants=("default",),
    prompt_len=2,
    max_num_seqs=1,
    budget=64,
)
@examples(60)
def test_a_best_effort_request_gets_its_share(
    newcomer: dict[str, Any],
    tenants: Sequence[str],
    prompt_len: int,
    max_num_seqs: int,
    budget: int,
) -> None:
    """The bound: it begins after `max_wait_s` at the latest, and has an eleventh of the time."""
    harness = BusyHarness(
        newcomer,
        num_waiting=3,
        tenants=tenants,
        slo_classes=CLASSES,
        max_num_seqs=max_num_seqs,
        budget=budget,
    )
    harness.warm_up(5)
    harness.add("R", prompt_len, 1, slo_class="batch")
    newcomer_steps = num_service_steps(
        newcomer["prompt_len"], newcomer["max_tokens"], harness.config
    )
    num_turns = 1 + num_service_steps(prompt_len, 0, harness.config)
    within_s = STEP_S * (1 + 1 / BEST_EFFORT) * num_turns * newcomer_steps
    within_s += harness.config.max_wait_s
    harness.await_first_token("R", within_s)


@given(
    newcomer_len=st.integers(1, 20),
    max_tokens=st.integers(2, 30),
    num_waiting=st.integers(1, 4),
    prompt_len=st.integers(60, 150),
    ttft_s=st.none() | st.floats(0.5, 4.0),
)
@examples(25)
def test_a_best_effort_prompt_that_others_pass_finds_room(
    newcomer_len: int, max_tokens: int, num_waiting: int, prompt_len: int, ttft_s: float | None
) -> None:
    """Newcomers with a promise always fill the cache; the prompt needs most of it.

    The bound: a hold that is as long as all streams take to end, and the prompt to be computed,
    comes after twenty times as long, and the next ones after twice as long again.
    """
    newcomer = {"prompt_len": newcomer_len, "max_tokens": max_tokens}
    promise = {"itl_slo_s": 5.0} if ttft_s is None else {"ttft_slo_s": ttft_s}
    harness = BusyHarness(
        newcomer,
        num_waiting,
        num_blocks=40,
        max_model_len=160,
        budget=64,
        max_num_seqs=24,
        **promise,
    )
    harness.warm_up(30)
    harness.add("R", prompt_len, 1, slo_class="batch")
    steps = num_service_steps(newcomer_len, max_tokens, harness.config)
    steps += num_service_steps(prompt_len, 1, harness.config)
    within_s = 2 * harness.config.max_wait_s * _BEST_EFFORT_WAITS + 20 * STEP_S * steps
    harness.await_first_token("R", 4 * within_s)


@pytest.mark.parametrize(
    "deep",
    [pytest.param({"context_s": 2e-4}, id="context"), pytest.param({"area_s": 1e-4}, id="area")],
)
def test_a_prompt_whose_chunks_do_not_fit_beside_the_streams_is_computed(
    deep: dict[str, float],
) -> None:
    """Newcomers begin at position 0, where a chunk costs little; the prompt has come further.

    The bound: whenever patience runs out, the running streams end, and then a chunk worth having
    fits.
    """
    itl_s, prompt_len, max_tokens = 0.25, 1200, 20
    harness = BusyHarness(
        {"prompt_len": 4, "max_tokens": max_tokens},
        num_waiting=3,
        machine=StepCosts(step_s=0.05, row_s=(0.0,) * 5, decode_row_s=0.02, **deep),
        itl_slo_s=itl_s,
        max_num_seqs=8,
        budget=64,
    )
    harness.warm_up(30)
    harness.add("R", prompt_len, 1)
    num_chunks = math.ceil(prompt_len / MIN_CHUNK)
    harness.await_first_token(
        "R", num_chunks * (harness.config.max_wait_s + (max_tokens + 1) * itl_s)
    )


QUICK = StepCosts(step_s=0.01, row_s=(0.0002,) * 5)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_best_effort_request_does_not_begin_again_and_again(
    *, enable_prefix_caching: bool
) -> None:
    """It was admitted and preempted in turn, 380 times in two minutes, and never ended."""
    harness = BusyHarness(
        {"prompt_len": 20, "max_tokens": 20, "tenant": "a"},
        num_waiting=4,
        machine=QUICK,
        budget=64,
        max_num_seqs=4,
        itl_slo_s=0.1,
        enable_prefix_caching=enable_prefix_caching,
    )
    harness.add("R", 200, 60, slo_class="batch", tenant="b")
    while not harness.finish_reasons["R"]:
        harness.refill()
        harness.step()
        assert harness.clock() < 40.0
    assert sum("R" in plan.preempted for plan in harness.plans) < 15


@pytest.mark.parametrize("num_slots", [4, 5])
def test_state_slots_of_best_effort_streams_are_given_up(num_slots: int) -> None:
    """A promised request waited until one of them ended."""
    harness = Harness(
        budget=64,
        max_num_seqs=4,
        num_blocks=4000,
        max_model_len=2048,
        states=StateSlots(num_slots, 1, block_size=4, unit=4, spacing=8),
        step_time=StepTimeModel(calibrate(QUICK, 2000)),
        step_time_s=truth(QUICK, lambda: 1.0),
        itl_slo_s=0.1,
    )
    for i in range(4):
        harness.add(str(i), 20, 1500, slo_class="batch")
    for _ in range(20):
        harness.step()
    since_s = harness.clock()
    harness.add("promised", 20, 4, tenant="a")
    while not harness.tokens["promised"]:
        harness.step()
        assert harness.clock() < since_s + 1.0
