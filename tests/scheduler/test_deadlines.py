"""Deadlines inside steps: a promise is used, and kept, by dropping few rows."""

import random
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.plan import Deadline, RowCut, ScheduledChunk, StepPlan
from legato.core.rows import CPU_ROWS
from legato.core.slo import SloClass
from legato.scheduler.margin import Deadlines, Tails
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel
from tests.scheduler.harness import Harness
from tests.scheduler.step_times import calibrate, step_shape

LIMIT_S = 0.12
COSTS = StepCosts(step_s=0.012, row_s=(4e-4,) * 5, decode_row_s=2e-4, area_s=2e-8, sample_s=1e-4)
MAX_LEN = 4000
LOOKS = (10 / 30, 15 / 30, 20 / 30, 25 / 30)
INTERRUPTED = Tails(body=(0.05,) * 256, watched_s=300.0, interruptions_s=(0.03,) * 200)
"""Of a machine on which every step may be interrupted for a quarter of the limit."""


class Server:
    """A scheduler whose executor drops rows, on a machine that other programs interrupt.

    Eight streams run, beside which prompts never end.

    Args:
        rate: interruptions a second of steps, each of 20 to 30 ms.
        speed: factor on the time of steps, unknown to the scheduler.
    """

    def __init__(self, *, drops_rows: bool, rate: float, speed: float = 1.0, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.rate, self.speed = rate, speed
        self.step_s = 0.0
        self.num_rows = self.num_dropped = 0
        self.model = StepTimeModel(calibrate(COSTS, MAX_LEN), drops_rows=drops_rows)
        self.harness = Harness(
            budget=2048,
            num_blocks=8000,
            max_num_seqs=16,
            max_model_len=MAX_LEN,
            itl_slo_s=LIMIT_S,
            slo_classes={"batch": SloClass()},
            step_time=self.model,
            step_time_s=lambda _: self.step_s,
        )
        for i in range(8):
            self.harness.add(f"stream {i}", 5, max_tokens=MAX_LEN - 10)

    def serve(self, num_steps: int) -> None:
        for i in range(num_steps):
            if self.harness.scheduler.stats.num_waiting == 0:
                self.harness.add(f"prompt {i} {self.harness.clock()}", 2600, max_tokens=1)
            plan = self.harness.plan()
            assert plan is not None
            self.compute(plan)

    def compute(self, plan: StepPlan) -> None:
        """As `DeadlineWatch` would, on layers that take 95 % of the step's time."""
        whole_s = self.speed * COSTS.seconds(StepShape.of(plan)) * self.rng.gauss(1.0, 0.02)
        lost_s = 0.0
        if self.rng.random() < self.rate * whole_s:
            lost_s = self.rng.uniform(0.02, 0.03)
        lost_at, layers_s, now_s, done = self.rng.random(), 0.95 * whole_s, 0.0, 0.0
        num_rows, cuts, foreseen_s = plan.num_tokens, [], None
        for look in (*LOOKS, 1.0):
            layer_s = layers_s * self.cost(plan, num_rows)
            now_s += (look - done) * layer_s + (lost_s if done <= lost_at < look else 0.0)
            done = look
            if plan.deadline is None or look == 1.0:
                continue
            rest_s = (1.0 - look) * layers_s
            foreseen_s = now_s + rest_s * self.cost(plan, num_rows)
            while foreseen_s > plan.deadline.layers_s and num_rows > 48:
                num_rows = CPU_ROWS.full(num_rows - 1)
                foreseen_s = now_s + rest_s * self.cost(plan, num_rows)
            if num_rows < (cuts[-1].num_rows if cuts else plan.num_tokens):
                cuts.append(RowCut(look, num_rows))
        self.step_s = now_s + 0.05 * whole_s
        self.num_rows += plan.num_tokens
        self.num_dropped += plan.num_tokens - num_rows
        self.harness.run_first_rows(num_rows, tuple(cuts), foreseen_s)

    def cost(self, plan: StepPlan, num_rows: int) -> float:
        return COSTS.seconds(StepShape.of(plan.first_rows(num_rows))) / COSTS.seconds(
            StepShape.of(plan)
        )

    def gaps_s(self) -> list[float]:
        return [t - s for s, t in pairwise(self.harness.token_times_s["stream 0"])]


@pytest.mark.parametrize("rate", [0.0, 0.2, 1.0])
def test_a_promise_is_used_and_kept(rate: float) -> None:
    """From the first step on, without having seen the machine."""
    server = Server(drops_rows=True, rate=rate)
    server.serve(700)
    gaps_s = server.gaps_s()
    assert median(gaps_s) > (0.84 if rate < 1.0 else 0.64) * LIMIT_S
    assert sum(gap_s > LIMIT_S for gap_s in gaps_s) <= 0.01 * len(gaps_s)
    assert server.num_dropped < 0.035 * server.num_rows
    assert bool(rate) <= bool(server.num_dropped)


def test_without_dropping_interruptions_need_room() -> None:
    dropping, waiting = Server(drops_rows=True, rate=0.2), Server(drops_rows=False, rate=0.2)
    for server in (dropping, waiting):
        server.serve(700)
    assert not waiting.num_dropped
    assert all(plan.deadline is None for plan in waiting.harness.plans)
    assert median(dropping.gaps_s()) > 1.1 * median(waiting.gaps_s())


@pytest.mark.parametrize("speed", [1.0, 1.5, 0.7])
def test_the_belief_learns_the_work_that_was_done(speed: float) -> None:
    """Steps that drop rows end earlier than planned, and teach nothing wrong."""
    server = Server(drops_rows=True, rate=0.5, speed=speed)
    server.serve(600)
    assert server.num_dropped
    for shape in (
        step_shape(num_decodes=8, context=500, chunk=150, start=1000),
        step_shape(num_decodes=8, context=500),
    ):
        assert server.model.seconds(shape) == pytest.approx(speed * COSTS.seconds(shape), rel=0.06)


@given(wanted=st.lists(st.floats(0.0, 0.4), min_size=200, max_size=400))
def test_few_rows_are_dropped_however_long_steps_are_planned(wanted: list[float]) -> None:
    """`wanted`: by which share each step is planned too long, without shortening."""
    deadlines, dropped = Deadlines(), []
    for share in wanted:
        dropped.append(max(0.0, share - deadlines.shortening))
        deadlines.observe(0.1, LIMIT_S, None, dropped[-1])
        assert 0.0 <= deadlines.shortening <= 0.5
    assert sum(dropped) <= 0.02 * len(dropped) + 5.0 + 1e-9
    for _ in range(250):
        deadlines.expire()
    assert deadlines.shortening == 0.0


@given(seed=st.integers(0, 999), most=st.floats(0.0, 0.4))
def test_few_steps_are_late_however_long_steps_are_planned(seed: int, most: float) -> None:
    """Each step must be planned to be shorter by some share, up to `most`, to be in time."""
    rng, deadlines, num_late = random.Random(seed), Deadlines(), 0
    deadlines.set_miss_rate(0.001)
    for _ in range(1000):
        is_late = most * rng.random() > deadlines.shortening
        num_late += is_late
        deadlines.observe(1.1 * LIMIT_S if is_late else 0.1, LIMIT_S, None, 0.0)
    assert num_late <= 0.005 * 1000 + 0.5 / 0.03
    shortening = deadlines.shortening
    deadlines.observe(2.0 * LIMIT_S, LIMIT_S, None, 0.0)  # no shorter step would be in time
    assert deadlines.shortening <= shortening


def test_the_guard_covers_what_comes_after_the_last_look() -> None:
    rng, deadlines, num_more = random.Random(0), Deadlines(), 0
    assert 0.0 < deadlines.guard_s(LIMIT_S) < 0.1 * LIMIT_S
    for i in range(2000):
        unforeseen_s = 0.003 + 0.002 * rng.random() + 0.01 * (rng.random() < 0.01)
        num_more += i >= 256 and unforeseen_s > deadlines.guard_s(LIMIT_S)
        deadlines.observe(0.1, LIMIT_S, 0.1 - unforeseen_s, 0.0)
    assert num_more < 0.04 * 1744
    assert deadlines.guard_s(LIMIT_S) < 0.01
    for _ in range(300):
        deadlines.observe(1.1, LIMIT_S, 0.1, 0.0)
    assert deadlines.guard_s(LIMIT_S) == 0.25 * LIMIT_S


def test_only_steps_that_may_drop_rows_need_no_room_for_interruptions() -> None:
    prior = calibrate(COSTS, MAX_LEN)
    usual = StepTimeModel(prior, tails=INTERRUPTED)
    dropping = StepTimeModel(prior, tails=INTERRUPTED, drops_rows=True)
    streams, nothing = step_shape(num_decodes=8, context=100), StepShape()

    def longest(model: StepTimeModel, shape: StepShape) -> int:
        return model.longest_chunk(shape, 0, LIMIT_S, 2048)

    assert longest(dropping, streams) > 1.2 * longest(usual, streams)
    assert longest(dropping, nothing) == longest(usual, nothing)
    assert dropping.safety_factor(LIMIT_S) == usual.safety_factor(LIMIT_S)  # of decodes and drafts
    assert dropping.margin_at(LIMIT_S) == usual.margin_at(LIMIT_S)
    mixed = step_shape(num_decodes=8, context=100, chunk=100)
    assert usual.deadline(mixed, LIMIT_S) is None
    assert dropping.deadline(streams, LIMIT_S) is None
    assert dropping.deadline(step_shape(chunk=100), LIMIT_S) is None
    deadline = dropping.deadline(mixed, LIMIT_S)
    assert deadline is not None
    assert 0.9 * LIMIT_S < deadline.layers_s < deadline.late_s == LIMIT_S
    expected = 1.0 - COSTS.seconds(streams) / COSTS.seconds(mixed)
    assert deadline.prefill_share == pytest.approx(expected, rel=0.01)


def test_no_margin_is_larger_than_the_step() -> None:
    """As where steps took several times their predictions, on a machine that stood still."""
    tails = Tails(body=(4.0,) * 20, watched_s=10.0)
    model = StepTimeModel(calibrate(COSTS, MAX_LEN), tails=tails, drops_rows=True)
    streams = step_shape(num_decodes=8, context=100)
    assert model.margin == 1.0
    assert model.prefill_safety_factor(streams, LIMIT_S) == model.safety_factor(LIMIT_S) == 2.0


@given(num_decodes=st.integers(1, 600))
def test_what_a_step_cannot_drop_any_more_needs_room(num_decodes: int) -> None:
    """Two thirds of its prefill, on average, and all of its streams."""
    model = StepTimeModel(calibrate(COSTS, MAX_LEN), tails=INTERRUPTED, drops_rows=True)
    streams = step_shape(num_decodes=num_decodes, context=100)
    streams_s, safety_factor = model.seconds(streams), model.safety_factor(LIMIT_S)
    prefill_s = LIMIT_S / model.prefill_safety_factor(streams, LIMIT_S) - streams_s
    if streams_s * safety_factor >= LIMIT_S:
        assert model.prefill_safety_factor(streams, LIMIT_S) == safety_factor
    else:
        assert safety_factor * (streams_s + prefill_s * 2.0 / 3.0) <= LIMIT_S * (1.0 + 1e-9)
        assert model.prefill_safety_factor(streams, LIMIT_S) < safety_factor


def test_nothing_is_due_without_a_promise() -> None:
    """Neither beside best-effort streams, nor where tokens are counted."""
    for settings, slo_class in (
        ({"itl_slo_s": LIMIT_S, "slo_classes": {"batch": SloClass()}}, "batch"),
        ({}, "interactive"),
    ):
        model = StepTimeModel(calibrate(COSTS, MAX_LEN), drops_rows=True)
        harness = Harness(budget=64, num_blocks=500, max_model_len=400, step_time=model, **settings)
        harness.add("stream", 5, max_tokens=20, slo_class=slo_class)
        harness.step()
        harness.add("prompt", 300, slo_class=slo_class)
        harness.drain()
        assert all(plan.deadline is None for plan in harness.plans)


@given(
    num_decodes=st.integers(1, 20),
    sizes=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    data=st.data(),
)
def test_the_work_done_is_the_mean_over_the_layers(
    num_decodes: int, sizes: list[int], data: st.DataObject
) -> None:
    decodes = [ScheduledChunk(str(i), 50 + i, 1, (), 1, "decode") for i in range(num_decodes)]
    prompts = [ScheduledChunk(f"p{i}", 30 * i, n, (), 1, "prefill") for i, n in enumerate(sizes)]
    plan = StepPlan(step_id=0, chunks=(*decodes, *prompts))
    rows = st.integers(num_decodes + 1, plan.num_tokens)
    counts = sorted(data.draw(st.sets(rows, min_size=1, max_size=3)), reverse=True)
    done = sorted(data.draw(st.sets(st.floats(0.05, 0.95), min_size=3, max_size=3)))
    cuts = [RowCut(share, count) for share, count in zip(done, counts, strict=False)]
    shape = StepShape.computed(plan, cuts)
    costs = StepCosts(step_s=1e-3, row_s=(1e-4,) * 5, decode_row_s=1e-4, area_s=1e-7)
    ends = [0.0, *(cut.done for cut in cuts), 1.0]
    counts = [plan.num_tokens, *(cut.num_rows for cut in cuts)]
    expected_s = sum(
        (end - begin) * costs.seconds(StepShape.of(plan.first_rows(count)))
        for (begin, end), count in zip(pairwise(ends), counts, strict=True)
    )
    # Rows are rounded, and padded to a multiple of at most 32.
    assert costs.seconds(shape) == pytest.approx(expected_s, abs=33e-4)
    assert shape.num_decode_rows == num_decodes
    assert shape.num_samples == StepShape.of(plan.first_rows(counts[-1])).num_samples
    assert StepShape.computed(plan, ()).num_tokens == plan.num_tokens


def test_a_plan_without_its_last_rows() -> None:
    plan = StepPlan(
        step_id=0,
        chunks=(
            ScheduledChunk("a", 9, 1, (), 1, "decode"),
            ScheduledChunk("b", 5, 6, (), 1, "prefill", "prompt_end"),
            ScheduledChunk("c", 4, 2, (), 0, "prefill", "time_budget"),
        ),
        deadline=Deadline(0.1, 0.12, 0.5),
    )
    assert plan.first_rows(9) == plan
    assert plan.first_rows(7).chunks == plan.chunks[:2]
    decode, chunk = plan.first_rows(4).chunks
    assert decode == plan.chunks[0]
    assert (chunk.num_tokens, chunk.num_samples, chunk.ended_by) == (3, 0, "deadline")
    assert plan.part(plan.chunks).deadline is None
