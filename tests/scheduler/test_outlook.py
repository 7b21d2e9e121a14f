"""What an engine tells those who choose among several: its forecasts come true."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from legato.core.replica_state import ReplicaState
from legato.core.request import Request
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel
from legato.scheduler.streams_ahead import StreamsAhead
from tests.scheduler.harness import Harness
from tests.scheduler.step_times import calibrate

MAX_MODEL_LEN = 1200
COSTS = StepCosts(step_s=0.01, decode_row_s=0.001, row_s=(0.0002,) * 5, area_s=1e-7, sample_s=1e-4)


def loaded(
    num_streams: int, num_waiting: int, itl_s: float | None = 0.1, **settings: Any
) -> Harness:
    """Streams that run, and prompts that wait."""
    harness = Harness(
        budget=256,
        max_num_seqs=num_streams + num_waiting + 1,
        num_blocks=4000,
        max_model_len=MAX_MODEL_LEN,
        step_time=StepTimeModel(calibrate(COSTS, MAX_MODEL_LEN)),
        step_time_s=lambda plan: COSTS.seconds(StepShape.of(plan)),
        itl_slo_s=itl_s,
        **settings,
    )
    for i in range(num_streams):
        harness.add(f"stream {i}", 40, 1000)
    for _ in range(20):
        harness.step()
    for i in range(num_waiting):
        harness.add(f"waiting {i}", 300, 200)
    return harness


def served_ttft_s(harness: Harness, num_tokens: int) -> float:
    """Of a request that comes now."""
    since_s = harness.clock()
    harness.add("late", num_tokens, 10)
    while not harness.token_times_s["late"]:
        harness.step()
    return harness.token_times_s["late"][0] - since_s


@pytest.mark.parametrize(("num_streams", "num_waiting"), [(0, 0), (12, 0), (12, 9), (0, 9)])
@pytest.mark.parametrize("num_tokens", [50, 900])
def test_a_request_that_comes_is_served_when_it_was_forecast(
    num_streams: int, num_waiting: int, num_tokens: int
) -> None:
    """If it passes no other: else a short one is served before."""
    harness = loaded(num_streams, num_waiting, prefill_order="fcfs")
    state = harness.scheduler.state(harness.clock())
    assert (state.num_running, state.num_waiting) == (num_streams, num_waiting)
    actual_s = served_ttft_s(harness, num_tokens)
    assert state.ttft_s(num_tokens) == pytest.approx(actual_s, rel=0.35, abs=0.03)


def test_the_next_gap_is_as_forecast_and_grows_with_the_streams() -> None:
    states = []
    for num_streams in (1, 12):
        harness = loaded(num_streams, 0)
        states.append(harness.scheduler.state(harness.clock()))
        begun_s = harness.clock()
        harness.step()
        assert states[-1].itl_s == pytest.approx(harness.clock() - begun_s, rel=0.2)
    assert states[0].itl_s < states[1].itl_s


def test_asking_changes_nothing_and_an_engine_that_knows_nothing_says_so() -> None:
    harness = Harness()
    before = harness.scheduler.state(0.0)
    assert before == ReplicaState(num_blocks=64, num_free_blocks=64, block_size=4)
    harness.add("a", 40)
    harness.step()
    state = harness.scheduler.state(harness.clock())
    assert state.num_free_blocks < 64
    assert [tenant.name for tenant in state.tenants] == ["default"]
    harness.drain()


@pytest.mark.parametrize("promise", [{"itl_s": 0.3}, {"itl_s": None, "tpot_slo_s": 0.25}], ids=str)
@pytest.mark.parametrize("prompt_len", [40, 1000])
def test_the_work_of_a_forecast_is_bounded(
    promise: dict[str, Any], prompt_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of streams that end one by one, and a queue whose prompts take minutes."""
    harness = loaded(200, 0, **promise, shed_load=True, ttft_slo_s=600.0)
    for i in range(40):
        harness.add(f"one of many {i}", prompt_len, 1 + i)
    evaluations: list[str] = []

    def counting(name: str, evaluate: Callable[..., float]) -> Callable[..., float]:
        def counted(*args: Any) -> float:
            evaluations.append(name)
            return evaluate(*args)

        return counted

    for name in ("seconds", "chunk_cost_s"):
        monkeypatch.setattr(StepCosts, name, counting(name, getattr(StepCosts, name)))
    for work, bound in (
        (lambda: harness.scheduler.state(harness.clock()), 400),
        (lambda: harness.add("one more", prompt_len, 10), 300),
    ):
        evaluations.clear()
        work()
        assert 10 < len(evaluations) < bound


def test_requests_ahead_of_a_short_and_a_long_prompt_are_played_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = loaded(20, 30)
    num_played = 0
    add = StreamsAhead.add

    def counted(streams: StreamsAhead, requests: Sequence[Request]) -> None:
        nonlocal num_played
        num_played += len(requests)
        add(streams, requests)

    monkeypatch.setattr(StreamsAhead, "add", counted)
    harness.scheduler.state(harness.clock())
    assert num_played == 30
