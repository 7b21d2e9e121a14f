"""What a calibration runs, on an executor that checks it like a cache would."""

from array import array
from typing import Any

import pytest

from legato.core.plan import StepPlan
from legato.core.rows import CPU_ROWS
from legato.engine.calibration.calibration import CALIBRATION_S, ON_A_CPU, Calibration, Extent
from legato.engine.calibration.disturbance import LEAST_STEPS, coverage_gap
from legato.executor.simulated import SimulatedExecutor, VirtualClock
from legato.scheduler.cost_fit import MeasuredStep, fit
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape
from tests.scheduler.step_times import step_shape

BLOCK_SIZE = 16
COSTS = StepCosts(
    step_s=0.02,
    row_s=(2e-5, 2e-4, 2.5e-4, 2.5e-4, 2.5e-4),
    decode_row_s=8e-4,
    decode_context_s=4e-6,
    chunk_s=5e-3,
    area_s=1e-7,
    context_s=5e-6,
    draft_row_s=3e-4,
    draft_context_s=1e-6,
)


class CheckingExecutor(SimulatedExecutor):
    """Knows which of its requests it holds, and what of the cache was written."""

    def __init__(
        self, clock: VirtualClock, num_blocks: int, slowdown: float, extent: Extent, depth: int
    ) -> None:
        def seconds(plan: StepPlan) -> float:
            pause_s = self.pauses_s.get(plan.step_id, 0.0)
            return slowdown * COSTS.seconds(StepShape.of(plan)) + pause_s

        super().__init__(clock, seconds, depth=depth)
        self.pauses_s: dict[int, float] = {}
        self.num_blocks = num_blocks
        self.extent = extent
        self.held: set[str] = set()
        self.written: set[int] = set()  # slots
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self.held -= set(plan.ended_requests)
        new = {request.request_id for request in plan.new_requests}
        assert not new & self.held
        self.held |= new
        for chunk in plan.chunks:
            assert chunk.request_id in self.held
            assert max(chunk.block_ids) < self.num_blocks
            assert chunk.end <= len(chunk.block_ids) * BLOCK_SIZE
            slots = [block * BLOCK_SIZE + i for block in chunk.block_ids for i in range(BLOCK_SIZE)]
            if not self.extent.reads_unwritten:
                assert self.written.issuperset(slots[: chunk.start]), "reads what was never written"
            self.written.update(slots[chunk.start : chunk.end])
        self.plans.append(plan)
        super().submit(plan)


class Measurement:
    def __init__(
        self,
        *,
        num_blocks: int = 1000,
        max_model_len: int = 8192,
        max_num_seqs: int = 64,
        most_drafts: int = 0,
        slowdown: float = 1.0,
        extent: Extent = ON_A_CPU,
        depth: int = 1,
        pauses_s: dict[int, float] | None = None,
    ) -> None:
        """Measure. Args: pauses_s: pauses of the machine, in seconds; key the step's number."""
        clock = VirtualClock()
        self.shares: list[float] = []
        pauses_s = pauses_s or {}
        self.executor = CheckingExecutor(clock, num_blocks, slowdown, extent, depth)
        self.executor.pauses_s = pauses_s
        calibration = Calibration(
            self.executor,
            block_size=BLOCK_SIZE,
            block_ids=range(num_blocks),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            vocab_size=100,
            most_drafts=most_drafts,
            extent=extent,
            clock=clock,
        )
        self.steps: list[MeasuredStep] = calibration.run(self.shares.append)
        self.seconds = clock()
        self.gap = calibration.gap(self.steps)


def test_the_costs_are_found() -> None:
    costs = fit(Measurement().steps)
    for shape in (
        step_shape(num_decodes=1, context=50),
        step_shape(num_decodes=40, context=2000),
        step_shape(num_decodes=8, context=300, chunk=200, start=4000),
        step_shape(chunk=1000, start=0),
    ):
        assert costs.seconds(shape) == pytest.approx(COSTS.seconds(shape), rel=0.02)


TYPICAL = (
    step_shape(num_decodes=1, context=50),
    step_shape(num_decodes=32, context=1000),
    step_shape(num_decodes=8, context=300, chunk=200, start=4000),
)


@pytest.mark.parametrize("pauses_s", [{1: 10.0}, {3: 60.0}, {20: 10.0}, {40: 3600.0}], ids=str)
def test_a_pause_of_the_machine_cuts_nothing_short(pauses_s: dict[int, float]) -> None:
    measured = Measurement(pauses_s=pauses_s)
    costs = fit(measured.steps)
    for shape in TYPICAL:
        assert costs.seconds(shape) == pytest.approx(COSTS.seconds(shape), rel=0.03)
    assert not measured.gap
    assert len(measured.steps) > 0.7 * len(Measurement().steps)


@pytest.mark.parametrize("slowdown", [0.1, 1.0, 4.0, 10.0, 30.0, 100.0])
def test_a_fit_without_a_gap_holds_in_service(slowdown: float) -> None:
    """The slower the machine, the fewer steps: it measures longer, or says what is missing."""
    measured = Measurement(slowdown=slowdown)
    if measured.gap:
        assert slowdown >= 10.0
        return
    costs = fit(measured.steps)
    for shape in TYPICAL:
        assert costs.seconds(shape) == pytest.approx(slowdown * COSTS.seconds(shape), rel=0.1)


def gap(steps: list[MeasuredStep], max_num_seqs: int = 64, num_tokens: int = 8192) -> str:
    return coverage_gap(steps, CPU_ROWS, max_num_seqs=max_num_seqs, num_tokens=num_tokens)


def test_what_was_not_measured_is_a_gap() -> None:
    steps = Measurement().steps
    prefill = [step for step in steps if not step[0].num_decode_rows]
    decodes = [step for step in steps if not step[0].num_prefill_chunks]
    assert gap(steps) == gap(steps, 128) == ""
    assert "too few" in gap(steps[-3:])
    assert "64 decodes" in gap(steps, 256)
    assert "alike" in gap(2 * prefill)
    assert "prefill" in gap(2 * decodes)
    short = [step_shape(num_decodes=n, context=16, chunk=9) for n in (1, 2, 32, 64) * 4]
    assert "wrongly" in gap([(shape, COSTS.seconds(shape)) for shape in short])
    one = Measurement(max_num_seqs=1).steps
    assert gap(one, 1) == ""
    assert "alike" in gap(one)


def test_the_costs_of_drafts_are_found_where_there_will_be_some() -> None:
    costs = fit(Measurement(most_drafts=64).steps)
    for num_decodes, num_drafts, context, chunk in (
        (1, 1, 50, 0),
        (1, 16, 4000, 0),
        (12, 5, 700, 0),
        (4, 3, 1500, 200),
    ):
        shape = step_shape(num_decodes=num_decodes, context=context, chunk=chunk, start=2000)
        for _ in range(num_decodes):
            shape.add_drafts(context, num_drafts)
        assert costs.seconds(shape) == pytest.approx(COSTS.seconds(shape), rel=0.03)
    assert not any(shape.num_draft_rows for shape, _ in Measurement().steps)


def test_drafts_are_tokens_of_the_prompt_and_no_more_than_a_step_holds() -> None:
    """It writes back what was there, and reads no row that is not sampled."""
    measured = Measurement(most_drafts=40, max_num_seqs=32, slowdown=0.1)
    plans = measured.executor.plans
    drafting = [plan for plan in plans if any(c.kind == "verify" for c in plan.chunks)]
    assert {1, 16} <= {len(c.draft_token_ids) for plan in drafting for c in plan.chunks}
    for plan in drafting:
        drafts = [c.draft_token_ids for c in plan.chunks]
        assert 0 < sum(map(len, drafts)) <= 40
        assert sum(c.num_samples for c in plan.chunks) <= 32 + 40
    (prompt,) = {bytes(r.prompt_token_ids) for plan in plans for r in plan.new_requests}
    for chunk in (c for plan in drafting for c in plan.chunks if c.kind == "verify"):
        assert chunk.num_tokens == chunk.num_samples == 1 + len(chunk.draft_token_ids)
        tokens = array("i", prompt)[chunk.start + 1 : chunk.end]
        assert chunk.draft_token_ids == tuple(tokens)
    # Prompts beside them leave room for the other rows of a step.
    assert max(plan.num_tokens for plan in plans) <= ON_A_CPU.longest_chunk + 32


@pytest.mark.parametrize("slowdown", [0.01, 1.0, 10.0])
def test_it_ends_in_time_and_tells_how_far_it_is(slowdown: float) -> None:
    measured = Measurement(slowdown=slowdown)
    longest_s = max(seconds for _, seconds in measured.steps)
    most_s = CALIBRATION_S if len(measured.steps) > LEAST_STEPS else 2 * CALIBRATION_S
    assert measured.seconds <= most_s + 2 * longest_s
    assert measured.shares == sorted(measured.shares)
    assert measured.shares[-1] == 1.0


@pytest.mark.parametrize(
    "limits",
    [
        {"num_blocks": 2, "max_model_len": 32},
        {"num_blocks": 10, "max_model_len": 8192},
        {"max_model_len": 2},
        {"max_num_seqs": 1},
        {"max_num_seqs": 1, "most_drafts": 64},
        {"num_blocks": 2, "max_model_len": 32, "most_drafts": 64},
        {"max_model_len": 2, "most_drafts": 64},
        {"num_blocks": 70, "max_num_seqs": 256},
    ],
    ids=str,
)
def test_it_stays_within_the_machine(limits: dict[str, Any]) -> None:
    """The executor checks blocks and requests."""
    measured = Measurement(**limits)
    assert measured.steps
    assert max(s.num_decode_rows for s, _ in measured.steps) <= limits.get("max_num_seqs", 64)
    ends = [chunk.end for plan in measured.executor.plans for chunk in plan.chunks]
    assert max(ends) <= limits.get("max_model_len", 8192)


def test_where_nothing_need_be_written_decodes_read_more_than_was_computed() -> None:
    """As on a GPU, with two steps in flight and steps of no more than a budget and all that run."""
    extent = Extent(longest_chunk=300, longest_context=4096, reads_unwritten=True)
    measured = Measurement(num_blocks=2000, slowdown=0.1, extent=extent, depth=2, max_num_seqs=32)
    contexts = [s.decode_context for s, _ in measured.steps if s.num_decode_rows > 8]
    assert max(contexts) > 2 * 4096
    plans = measured.executor.plans
    ends = [chunk.end for plan in plans for chunk in plan.chunks]
    assert max(ends) <= 4096
    assert max(plan.num_tokens for plan in plans) <= 300 + 32
    assert max(len(plan.chunks) for plan in plans) <= 32
    costs = fit(measured.steps)
    shape = step_shape(num_decodes=20, context=1500, chunk=200, start=3000)
    assert costs.seconds(shape) == pytest.approx(0.1 * COSTS.seconds(shape), rel=0.02)


def test_at_most_one_request_is_left_behind() -> None:
    """The next plan's `ended_requests` names it, as a scheduler's last one does."""
    assert len(Measurement().executor.held) <= 1
