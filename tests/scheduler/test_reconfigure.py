"""Other settings between two steps: at once for all requests, and no request loses anything."""

from typing import Any

import pytest

from legato.core.plan import StepPlan
from legato.core.slo import SloClass
from legato.scheduler.step_time import StepTimeModel
from legato.speculation.lookup import OwnTokens, RecentOutputs
from tests.scheduler.drafters import RandomDrafter
from tests.scheduler.harness import VOCAB_SIZE, Harness, coming
from tests.scheduler.step_times import calibrate, truth
from tests.scheduler.test_promises import LINEAR


def harness_of(**settings: Any) -> Harness:
    return Harness(
        num_blocks=2000,
        max_model_len=4000,
        step_time=StepTimeModel(calibrate(LINEAR, 4000)),
        step_time_s=truth(LINEAR, lambda: 1.0),
        **settings,
    )


def run_streams(harness: Harness, num_streams: int = 3) -> None:
    for i in range(num_streams):
        harness.add(f"stream {i}", 5, max_tokens=100)
    for _ in range(5):
        harness.step()


def next_step(harness: Harness) -> StepPlan:
    plan = harness.step()
    assert plan is not None
    return plan


def test_a_token_budget_holds_from_the_next_step_on() -> None:
    harness = harness_of(budget=64)
    run_streams(harness)
    harness.add("long", 1000)
    for budget in (64, 16, 200):
        harness.reconfigure(max_num_batched_tokens=budget)
        assert next_step(harness).num_tokens == budget


def test_without_chunks_a_begun_prompt_is_finished_in_one_step() -> None:
    harness = harness_of(budget=64)
    run_streams(harness)
    harness.add("long", 1000, max_tokens=1)
    next_step(harness)
    harness.reconfigure(max_num_batched_tokens=None, enable_chunked_prefill=False)
    assert next_step(harness).num_tokens == 3 + 1000 - (64 - 3)
    assert harness.finish_reasons["long"]


def test_streams_that_run_follow_a_new_slo() -> None:
    harness = harness_of(budget=2048)
    run_streams(harness)
    for name, itl_slo_s in (("long", None), ("longer", 0.1)):
        harness.reconfigure(itl_slo_s=itl_slo_s)
        harness.add(name, 1500, max_tokens=1)
        before_s = harness.clock()
        next_step(harness)
        took_s = harness.clock() - before_s
        assert (took_s <= 0.1) is (itl_slo_s is not None)


def test_what_gave_up_its_promise_has_none_under_a_new_one_either() -> None:
    harness = harness_of(budget=64, ttft_slo_s=0.5, shed_load=True)
    harness.add("long", 3000, allow_best_effort=True)
    harness.add("short", 10)
    harness.reconfigure(ttft_slo_s=2.0)
    requests = [harness.scheduler._queues.get(name) for name in ("long", "short")]
    assert [request and request.slo for request in requests] == [SloClass(), SloClass(ttft_s=2.0)]


@pytest.mark.parametrize(("order", "first"), [("fcfs", "long"), ("slowdown", "short")])
def test_those_that_wait_are_ranked_anew(order: str, first: str) -> None:
    harness = harness_of(budget=32, max_num_seqs=1, prefill_order="lpm")
    harness.add("running", 10, max_tokens=3)
    next_step(harness)
    harness.add("long", 3000)
    harness.add("short", 10)
    harness.reconfigure(prefill_order=order)
    while harness.scheduler._queues.running.keys() <= {"running"}:
        next_step(harness)
    assert list(harness.scheduler._queues.running) == [first]


def test_drafts_are_turned_on_and_off() -> None:
    """A stream that began without drafts gets drafts, on an engine started with any setting."""
    drafter = RandomDrafter(coming, vocab_size=VOCAB_SIZE, rightness=1.0)
    harness = Harness(speculative="off", drafters=[drafter])
    harness.add("a", 8, max_tokens=40)
    for speculative, kind in (("off", "decode"), (3, "verify"), ("off", "decode"), (2, "verify")):
        harness.reconfigure(speculative=speculative)
        harness.step()
        harness.step()
        assert harness.plans[-1].chunks[0].kind == kind
    harness.drain()
    assert harness.tokens["a"] == harness.expected_tokens("a")


def test_off_keeps_no_output() -> None:
    own, recent = OwnTokens(), RecentOutputs()
    harness = Harness(speculative="off", drafters=[own, recent])

    def kept() -> int:
        return sum(len(index.token_ids) for index in recent._stores.values())

    for speculative in ("off", 3, "off"):
        harness.reconfigure(speculative=speculative)
        harness.add(f"running {speculative}", 8, max_tokens=40)
        harness.step()
        before = kept()
        harness.reconfigure(speculative=speculative, max_num_batched_tokens=100)
        harness.drain()
        assert not own._rows
        assert (kept() > before) is (speculative != "off")


def test_a_preempted_stream_is_drafted_for_when_it_runs_again() -> None:
    """Though drafts were turned on, or off, while it waited."""
    drafter = RandomDrafter(coming, vocab_size=VOCAB_SIZE, rightness=1.0)
    harness = Harness(
        num_blocks=8,
        block_size=4,
        admission_optimism=1.0,
        speculative="off",
        drafters=[drafter],
    )
    for name in ("old", "new"):
        harness.add(name, 8, max_tokens=20)
    while not next_step(harness).preempted:
        pass
    assert list(harness.scheduler._queues.running) == ["old"]
    harness.reconfigure(speculative=2, max_num_batched_tokens=1)
    assert drafter.num_told.keys() == {"old", "new"}
    harness.reconfigure(speculative="off")
    assert not drafter.num_told
    harness.reconfigure(speculative=2)
    harness.drain()
    for name in ("old", "new"):
        assert harness.tokens[name] == harness.expected_tokens(name)
