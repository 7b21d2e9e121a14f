"""Admission and preemption if the cache is too small for all requests."""

import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.config import SchedulerConfig
from legato.core.outputs import FinishReason
from legato.core.request import AddRequest, Request
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.executor.simulated import SimulatedExecutor, VirtualClock, simulated_token
from legato.kv.manager import KVCacheManager
from legato.scheduler.expected_ends import ExpectedEnds, OutputLengths
from legato.scheduler.scheduler import Scheduler
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape
from legato_lab.simulation.profiles import PROFILES
from tests.scheduler.harness import Harness
from tests.scheduler.requests import MAX_MODEL_LEN as LONGEST
from tests.scheduler.requests import waiting_request
from tests.scheduler.step_times import steady_model, truth

BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS, NUM_REQUESTS = 32, 4096, 64, 150
MANY_TOKENS = 2**31
"""So many that no token is by accident the one that ends a request."""


def test_the_latest_admitted_is_preempted_and_comes_back_first() -> None:
    harness = Harness(
        budget=64,
        num_blocks=8,
        block_size=4,
        max_model_len=32,
        admission_optimism=1.0,
        prefill_order="fcfs",
    )
    harness.add("old", 12, max_tokens=12)
    harness.add("new", 12, max_tokens=12)
    harness.add("later", 1, max_tokens=1)
    harness.drain()
    preempted = [plan.preempted for plan in harness.plans if plan.preempted]
    assert preempted
    assert all(ids == ("new",) for ids in preempted)
    assert harness.scheduler.stats.num_preemptions == len(preempted)
    for request_id in harness.added:
        assert harness.finish_reasons[request_id] == [FinishReason.LENGTH]
        assert harness.tokens[request_id] == harness.expected_tokens(request_id)


def test_a_preempted_request_goes_before_those_that_wait() -> None:
    harness = Harness(
        budget=64,
        num_blocks=8,
        block_size=4,
        max_model_len=32,
        max_num_seqs=2,
        admission_optimism=1.0,
        prefill_order="fcfs",
    )
    harness.add("old", 12, max_tokens=12)
    harness.add("new", 12, max_tokens=12)
    harness.add("later", 1, max_tokens=1)
    harness.drain()
    chunks = [chunk for plan in harness.plans for chunk in plan.chunks]
    begun = [c.request_id for c in chunks if c.start == 0 or c.num_tokens > 1]
    assert begun == ["old", "new", "new", "later"]


@pytest.mark.parametrize(
    ("num_blocks", "sizes"),
    [
        (10, [(2, 18), (8, 13), (4, 11)]),
        (11, [(8, 15), (5, 14), (4, 15)]),
        (13, [(5, 17), (1, 17), (4, 12)]),
    ],
)
def test_no_stream_of_a_step_is_preempted_for_one_that_joins_it(
    num_blocks: int, sizes: list[tuple[int, int]]
) -> None:
    """Best-effort streams join one by one; one of another tenant gives way to two of the first.

    The harness checks that what is preempted has no chunk.
    """
    harness = Harness(
        budget=64,
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=64,
        admission_optimism=1.0,
        itl_slo_s=10.0,
    )
    harness.add("promised", 3, max_tokens=20)
    for name, tenant, (prompt_len, max_tokens) in zip("abc", "xxy", sizes, strict=True):
        harness.add(name, prompt_len, max_tokens, slo_class="batch", tenant=tenant)
    harness.drain()
    assert any(plan.preempted for plan in harness.plans)
    for request_id in harness.added:
        assert harness.tokens[request_id] == harness.expected_tokens(request_id)


def test_a_prompt_is_preempted_before_a_stream_admitted_later() -> None:
    """Of 12 blocks "prompt" has 8 when "stream" and "old" outgrow their 2 each."""
    harness = Harness(budget=6, num_blocks=12, max_model_len=48, admission_optimism=1.0)
    harness.add("old", 5, max_tokens=12)
    harness.step()
    harness.add("prompt", 31, slo_class="interactive")
    harness.step()
    harness.add("stream", 4, max_tokens=8, priority=-9)
    harness.drain()
    assert {request_id for plan in harness.plans for request_id in plan.preempted} == {"prompt"}


@pytest.mark.parametrize(("optimism", "first_of_b"), [(0.0, 14), (1.0, 1)])
def test_admission_keeps_room_for_what_runs(optimism: float, first_of_b: int) -> None:
    """Of 6 blocks, "a" has 1 and will fill 4, and "b" wants 3 and later 5."""
    harness = Harness(num_blocks=6, max_model_len=24, admission_optimism=optimism)
    harness.add("a", 2, max_tokens=14)
    harness.step()
    harness.add("b", 9, max_tokens=10)
    harness.drain()
    steps_of_b = [
        i for i, plan in enumerate(harness.plans) if any(c.request_id == "b" for c in plan.chunks)
    ]
    assert steps_of_b[0] == first_of_b
    assert harness.scheduler.stats.num_preemptions == round(optimism)


def ended_after(num_output_tokens: int, **service: Any) -> Request:
    request = waiting_request(**service)
    for token_id in range(num_output_tokens):
        request.append(token_id, 0.0)
    return request


def test_a_tenants_class_has_lengths_of_its_own_once_some_have_ended() -> None:
    lengths = OutputLengths(0.5, LONGEST, {})
    for _ in range(100):
        lengths.observe(ended_after(2))
    other = waiting_request(tenant="other")
    assert [*lengths.expected([waiting_request(), other])[:, 0]] == [2, 2]
    for _ in range(8):
        lengths.observe(ended_after(6, tenant="other"))
    assert [*lengths.expected([waiting_request(), other])[:, 0]] == [2, 6]


def test_running_outputs_count_up_to_where_they_are() -> None:
    """The first to end after a start are the short ones; most are still running."""
    running = {str(i): ended_after(6) for i in range(24)}
    lengths = OutputLengths(0.5, LONGEST, running)
    for length in [*range(1, 5)] * 2:
        lengths.observe(ended_after(length))
    new, half_way, last = (ended_after(n, max_tokens=40) for n in (0, 6, 8))
    assert [*lengths.expected([new, half_way, last])[:, 0]] == [12, 6, 8]
    running.clear()
    lengths.observe(ended_after(30))
    assert lengths.steady_left(new) == 3


def test_a_promise_believes_max_tokens_until_outputs_have_ended() -> None:
    """Unless it is only what the context leaves."""
    lengths = OutputLengths(0.5, LONGEST, {})
    bounded, unbounded = waiting_request(), waiting_request(max_tokens=LONGEST)
    assert [lengths.steady_left(r) for r in (bounded, unbounded)] == [8, 256]
    for _ in range(8):
        lengths.observe(ended_after(3))
    assert [lengths.steady_left(r) for r in (bounded, unbounded)] == [3, 3]


def test_outputs_are_expected_to_be_like_those_that_ended() -> None:
    request = waiting_request()  # of at most 8 tokens
    by_optimism = {o: OutputLengths(o, MAX_MODEL_LEN, {}) for o in (0.0, 0.25, 0.75, 1.0)}

    def expected() -> dict[float, int]:
        return {o: int(lengths.expected([request])[0, 0]) for o, lengths in by_optimism.items()}

    assert expected() == {0.0: 8, 0.25: 8, 0.75: 8, 1.0: 1}
    for lengths in by_optimism.values():
        for length in [*range(1, 5)] * 128:
            lengths.observe(ended_after(length))
    assert expected() == {0.0: 8, 0.25: 3, 0.75: 1, 1.0: 1}
    for token_id in range(5):
        request.append(token_id, 0.0)
    assert expected() == {0.0: 3, 0.25: 3, 0.75: 3, 1.0: 3}, "longer than all: as long again"


@given(
    running=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 7)), max_size=8),
    prompt_len=st.integers(1, 30),
)
def test_the_peak_is_that_of_the_requests_played_forward(
    running: list[tuple[int, int]], prompt_len: int
) -> None:
    lengths = OutputLengths(0.0, MAX_MODEL_LEN, {})
    requests = []
    for num_tokens, num_output_tokens in running:
        requests.append(waiting_request(prompt_len=num_tokens))
        for token_id in range(num_output_tokens):
            requests[-1].append(token_id, 0.0)
    forecast = ExpectedEnds(requests[::2], lengths, 4)
    assert forecast._rows.dtype == lengths.expected([]).dtype == np.int64
    for request in requests[1::2]:
        forecast.add(request)
    newcomer = waiting_request(prompt_len=prompt_len)
    everyone = [*requests, newcomer]
    held = [math.ceil(r.num_tokens / 4) for r in everyone]
    ends = [*zip(lengths.expected(everyone)[:, 0], held, strict=True)]

    def level(after: int) -> int:
        """Blocks beyond those of now, when each has generated so many tokens or ended."""
        return sum(math.ceil(after / 4) if after <= end else -held for end, held in ends)

    assert forecast.peak_blocks(newcomer) == max(map(level, range(1, 9)))


class Pressed(msgspec.Struct, frozen=True):
    """Attributes: tokens_per_s: generated, on the virtual clock."""

    tokens_per_s: float
    num_preemptions: int


def serve(
    num_blocks: int, *, optimism: float = SchedulerConfig().admission_optimism, told: bool = False
) -> Pressed:
    """Many at once, on a CPU. Outputs end at a token of their own; `told`, at `max_tokens`."""
    config = SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, admission_optimism=optimism)
    scheduler = Scheduler(
        config.resolve(MAX_MODEL_LEN),
        max_model_len=MAX_MODEL_LEN,
        kv=KVCacheManager(num_blocks, BLOCK_SIZE),
    )
    costs, clock = PROFILES["smollm2-135m-cpu"].costs, VirtualClock()
    executor = SimulatedExecutor(
        clock, lambda plan: costs.seconds(StepShape.of(plan)), vocab_size=MANY_TOKENS
    )
    scheduler.apply(arrivals(told=told), 0.0)
    num_tokens = 0
    while (plan := scheduler.plan(clock())) is not None:
        executor.submit(plan)
        for output in scheduler.commit(executor.collect(), clock()):
            num_tokens += len(output.new_token_ids)
    assert not scheduler.has_work
    return Pressed(num_tokens / clock(), scheduler.stats.num_preemptions)


def arrivals(*, told: bool) -> list[AddRequest]:
    rng = random.Random(0)
    requests = []
    for number in range(NUM_REQUESTS):
        prompt_len = round(rng.lognormvariate(5.0, 0.6)) + 1
        output_len = min(1500, round(rng.lognormvariate(5.6, 0.8)) + 1)
        last = simulated_token(str(number), prompt_len + output_len - 1, MANY_TOKENS)
        params = SamplingParams(
            max_tokens=output_len if told else 4096, stop_token_ids=(last,), seed=0
        )
        prompt = range(number * 10_000, number * 10_000 + prompt_len)
        requests.append(
            AddRequest(request_id=str(number), prompt_token_ids=token_array(prompt), params=params)
        )
    return requests


@pytest.mark.parametrize("num_blocks", [8, 11])
def test_a_stream_that_has_waited_long_may_preempt_others_that_wait(num_blocks: int) -> None:
    costs = StepCosts(step_s=0.01, row_s=(0.0,) * 5, decode_row_s=0.03)
    harness = Harness(
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=32,
        itl_slo_s=0.06,  # a best-effort stream does not fit beside the promised one
        max_wait_s=0.1,
        admission_optimism=1.0,
        step_time=steady_model(costs, 32),
        step_time_s=truth(costs, lambda: 1.0),
    )
    for number in range(4):
        harness.add(f"rest {number}", 1, 20, slo_class="batch")
    for _ in range(3):
        harness.step()
    harness.add("promised", 2, 30)
    harness.drain()
    assert any(plan.preempted for plan in harness.plans)


SCARCE = 236
"""A quarter of the blocks that come to be in use where there is no end of them."""


@pytest.mark.parametrize("told", [True, False])
def test_a_quarter_of_the_memory_gives_most_of_the_throughput(told: bool) -> None:
    plenty, scarce = serve(10_000, told=told), serve(SCARCE, told=told)
    assert plenty.num_preemptions == 0
    assert scarce.tokens_per_s >= 0.6 * plenty.tokens_per_s
    assert scarce.num_preemptions < 0.3 * NUM_REQUESTS


def test_less_optimism_preempts_less() -> None:
    preemptions = [serve(SCARCE, optimism=o, told=True).num_preemptions for o in (0.0, 0.5, 1.0)]
    assert preemptions == sorted(preemptions)
    assert preemptions[0] == 0 < preemptions[2]
