"""Measuring again while there is nothing to do, on a virtual clock."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from legato.core.config import EngineConfig, SchedulerConfig
from legato.core.plan import StepPlan
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.engine.build.builder import load_runtime
from legato.engine.calibration import recalibration
from legato.engine.calibration.calibration import Calibration
from legato.engine.calibration.disturbance import Quality
from legato.engine.calibration.recalibration import Recalibration
from legato.engine.calibration.step_times import KnownSteps
from legato.engine.loop.engine_loop import EngineLoop
from legato.executor.simulated import SimulatedExecutor, VirtualClock
from legato.kv.manager import BorrowedBlocks, KVCacheManager
from legato.scheduler.cost_fit import MeasuredStep
from legato.scheduler.scheduler import Scheduler
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel
from tests.engine.test_calibration import BLOCK_SIZE, COSTS
from tests.scheduler.step_times import calibrate, step_shape

NUM_BLOCKS = 600
SHAPE = step_shape(num_decodes=8, context=300, chunk=200, start=400)
IN_DOUBT = Quality(median_error=0.01, p95_error=0.02, disturbed=0.0, waited=0.5)
SLOW = [(shape, 2.0 * seconds) for shape, seconds in calibrate(COSTS, 2000)]


class Server:
    """An engine that was calibrated while it was half as fast.

    Attributes:
        waited: what others have of the machine.
        fault: what each step raises, if anything.
        fail_next: what the next step raises, if anything.
        longest_s: the longest task that was done while the engine was idle.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = VirtualClock()
        self.waited, self.longest_s = 0.0, 0.0
        self.fault: Exception | None = None
        self.fail_next: Exception | None = None
        self.plans: list[StepPlan] = []
        self.kept: list[list[MeasuredStep]] = []
        self.kv = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE)
        self.executor = SimulatedExecutor(self.clock, self._seconds)
        self.step_time = StepTimeModel(SLOW)
        config = SchedulerConfig(max_num_batched_tokens=512).resolve(max_model_len=9000)
        scheduler = Scheduler(config, max_model_len=9000, kv=self.kv, step_time=self.step_time)
        monkeypatch.setattr(recalibration, "CoreWait", lambda: self)
        self.recalibration = Recalibration(self.kv, self._begin, self._keep, self.clock)
        self.engine = EngineLoop(
            scheduler,
            self.kv,
            self.executor,
            self.clock,
            recalibration=self.recalibration,
        )

    @property
    def share(self) -> float:
        """As `CoreWait`."""
        return self.waited

    @property
    def is_measuring(self) -> bool:
        return self.engine.idle_s == 0.0

    def idle(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass without a request, as the engine process does."""
        ends_s = self.clock.now_s + seconds
        while self.clock.now_s < ends_s and not until():
            began_s, wait_s = self.clock.now_s, self.engine.idle_s
            if wait_s is None:
                return
            self.clock.advance_to(min(ends_s, began_s + wait_s))
            began_s = self.clock.now_s
            self.engine.use_idle_time()
            self.longest_s = max(self.longest_s, self.clock.now_s - began_s)

    def serve(self, request_id: str, num_tokens: int = 100) -> float:
        """Seconds until its only token."""
        began_s = self.clock.now_s
        request = AddRequest(
            request_id=request_id,
            prompt_token_ids=token_array(range(num_tokens)),
            params=SamplingParams(max_tokens=1),
        )
        self.engine.step([request])
        while self.engine.has_work:
            self.engine.step()
        return self.clock.now_s - began_s

    def _seconds(self, plan: StepPlan) -> float:
        self.plans.append(plan)
        if self.fault is not None:
            raise self.fault
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        return COSTS.seconds(StepShape.of(plan))

    def _begin(self, borrowed: BorrowedBlocks) -> Calibration:
        return Calibration(
            self.executor,
            block_ids=borrowed.block_ids,
            block_size=BLOCK_SIZE,
            max_model_len=9000,
            max_num_seqs=16,
            vocab_size=100,
            longest_step_s=0.2,
            clock=self.clock,
        )

    def _keep(self, steps: list[MeasuredStep]) -> None:
        self.step_time.begin_again(steps)
        self.kept.append(steps)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def test_what_was_measured_on_a_busy_machine_is_replaced_in_quiet(server: Server) -> None:
    assert server.step_time.seconds(SHAPE) == pytest.approx(2 * COSTS.seconds(SHAPE), rel=0.05)
    server.idle(4.0)
    assert not server.plans
    server.idle(30.0)
    assert len(server.kept) == 1
    assert server.step_time.seconds(SHAPE) == pytest.approx(COSTS.seconds(SHAPE), rel=0.05)
    assert server.engine.idle_s is None
    assert server.kv.num_free_blocks == NUM_BLOCKS
    assert server.longest_s < 0.5


def test_a_request_waits_for_one_short_step(server: Server) -> None:
    alone_s = server.serve("alone")
    server.idle(20.0, until=lambda: len(server.plans) > 20)
    assert server.is_measuring
    began_s = server.clock.now_s
    # 101 tokens, another prompt; ending the attempt takes the shortest step there is.
    assert server.serve("meanwhile", 101) < alone_s + COSTS.seconds(step_shape(chunk=1)) + 0.01
    assert not server.is_measuring
    server.idle(50.0 - (server.clock.now_s - began_s))
    assert not server.kept, "an attempt that was given up is not repeated at once"
    server.idle(40.0)
    assert len(server.kept) == 1


def test_nothing_is_evicted_and_no_block_is_lost(server: Server) -> None:
    for number in range(3):
        server.serve(f"request {number}", 1600)
    cached = server.kv.num_cached_blocks
    assert cached
    server.idle(30.0)
    assert server.kept
    assert server.kv.num_cached_blocks == cached
    written = {b for plan in server.plans[10:] for chunk in plan.chunks for b in chunk.block_ids}
    assert len(written) <= NUM_BLOCKS - cached
    assert server.kv.num_free_blocks == NUM_BLOCKS


def test_a_cache_that_is_full_is_left_alone(server: Server) -> None:
    server.serve("long", 8990)
    assert server.kv.num_cached_blocks > NUM_BLOCKS - 64
    num_plans = len(server.plans)
    server.idle(1000.0)
    assert len(server.plans) == num_plans


def test_a_step_that_fails_ends_it_and_nothing_else(server: Server) -> None:
    server.idle(20.0, until=lambda: len(server.plans) > 20)
    server.fault = RuntimeError("no such luck")
    server.idle(1000.0)
    assert len(server.plans) == 22
    assert server.kv.num_free_blocks == NUM_BLOCKS
    server.fault = None
    assert server.serve("later") > 0.0


@pytest.mark.parametrize("num_plans", [1, 21])
def test_an_error_in_the_last_step_of_an_attempt_ends_nothing_else(
    server: Server, num_plans: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The step that ends an attempt fails because a request has come: the request is served."""
    server.idle(20.0, until=lambda: len(server.plans) >= num_plans)
    assert server.is_measuring
    server.fail_next = MemoryError("transient")
    assert server.serve("meanwhile") > 0.0
    assert "the measuring of step times failed" in caplog.text
    assert server.kv.num_free_blocks == NUM_BLOCKS
    assert server.engine.idle_s is None


def test_an_attempt_that_cannot_begin_keeps_no_blocks(server: Server) -> None:
    def fail(_: BorrowedBlocks) -> Calibration:
        raise MemoryError("no more states")

    server.recalibration._begin = fail
    server.idle(30.0)
    assert server.kv.num_free_blocks == NUM_BLOCKS
    assert server.serve("later") > 0.0


def test_an_error_at_the_second_of_two_steps_leaves_none_in_flight() -> None:
    clock = VirtualClock()

    class Executor(SimulatedExecutor):
        num_submitted = 0

        def submit(self, plan: StepPlan) -> None:
            self.num_submitted += 1
            if self.num_submitted == 20:
                raise MemoryError("transient")
            super().submit(plan)

    executor = Executor(clock, lambda plan: COSTS.seconds(StepShape.of(plan)), depth=2)
    calibration = Calibration(
        executor,
        block_ids=range(100),
        block_size=BLOCK_SIZE,
        max_model_len=900,
        max_num_seqs=4,
        vocab_size=100,
        clock=clock,
    )
    with pytest.raises(MemoryError):
        list(calibration.steps())
    assert not executor._submitted


def test_only_what_is_needed_is_measured(server: Server) -> None:
    is_needed = False
    server.recalibration._is_needed = lambda: is_needed
    assert server.engine.idle_s is None
    server.idle(100.0)
    assert not server.plans
    is_needed = True
    server.serve("request")
    server.idle(30.0)
    assert len(server.kept) == 1


def test_a_machine_that_stays_busy_is_looked_at_less_and_less(server: Server) -> None:
    server.waited = 0.5
    server.idle(6 * 3600.0)
    busy_s = sum(COSTS.seconds(StepShape.of(plan)) for plan in server.plans)
    assert not server.kept
    assert busy_s < 30.0
    assert server.kv.num_free_blocks == NUM_BLOCKS
    server.waited = 0.0
    server.idle(2 * 3600.0)
    assert len(server.kept) == 1


def test_on_the_real_model_it_leaves_the_cache_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recalibration, "_QUIET_S", 0.0)
    monkeypatch.setattr(recalibration, "_FIRST_LOOK_S", math.inf)  # the machine may be busy
    config = EngineConfig.of(
        quantization="none",  # with codes, a warm prompt's few rows are rounded to 8 bits
        max_model_len=2048,
        kv_cache_memory_bytes=2**27,
        num_threads=1,
        calibration_dir=str(tmp_path),
    )
    runtime = load_runtime(config)
    step_time = StepTimeModel()
    scheduler = Scheduler(
        runtime.config.scheduler, max_model_len=2048, kv=runtime.kv, step_time=step_time
    )
    engine = EngineLoop(
        scheduler,
        runtime.kv,
        runtime.executor,
        recalibration=runtime.step_times.recalibration(step_time, KnownSteps(SLOW, IN_DOUBT)),
    )

    def tokens(request_id: str) -> list[int]:
        request = AddRequest(
            request_id=request_id,
            prompt_token_ids=token_array(range(1000, 1300)),
            params=SamplingParams(temperature=0.0, max_tokens=8),
        )
        outputs = engine.step([request])
        while engine.has_work:
            outputs += engine.step()
        return [token for output in outputs for token in output.new_token_ids]

    before, cached = tokens("before"), runtime.kv.num_cached_blocks
    assert len(before) == 8
    for _ in range(8):
        assert engine.idle_s == 0.0
        engine.use_idle_time()
    assert runtime.kv.usage > 0.2, "it writes to the cache"
    assert tokens("after") == before
    assert runtime.kv.num_cached_blocks == cached
    assert engine.stats.num_prefix_cache_hits > 0


@pytest.mark.parametrize("part", ["begin", "measure", "forget", "give_back"])
def test_a_recalibration_that_fails_ends_alone(
    part: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At whichever of its steps, also when a request comes; its blocks are given back."""
    num_raised = 0

    def raising(*_: Any) -> Any:
        nonlocal num_raised
        num_raised += 1
        raise MemoryError(part)

    if part == "begin":
        monkeypatch.setattr(server.engine._recalibration, "_begin", raising)
    server.idle(30.0, lambda: len(server.plans) > 4)
    if part == "measure":
        server.fault = MemoryError(part)
        server.idle(1.0)
        server.fault = None
    elif part == "forget":
        monkeypatch.setattr(Calibration, "forget", raising)
    elif part == "give_back":
        give_back, times = server.kv.give_back, iter([True])

        def once(borrowed: BorrowedBlocks) -> None:
            if next(times, False):
                raising()
            give_back(borrowed)

        monkeypatch.setattr(server.kv, "give_back", once)
    assert server.serve("a") > 0.0
    assert server.engine.stats.num_contained_errors == 1
    assert num_raised == (part != "measure")
    assert server.engine._recalibration is not None
    assert server.engine._recalibration.is_done
    assert server.kv.num_free_blocks == server.kv.num_blocks
    assert server.engine.idle_s is None
