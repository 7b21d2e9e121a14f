"""What does the scheduler itself cost a step? `apply`, `plan`, `commit` and `state`, in us.

    python -m benchmarks planning [--steps 2000]

The real scheduler and KV manager drive the simulated executor. Each scene keeps its numbers of
running and waiting requests: each that ends is replaced. Prints a table, with the 99th percentile
of `plan` beside the wanted one. Of `state`, which routers ask for once a second, and of `apply`,
which forecasts each arrival where load is shed, 2,000 us are wanted.
"""

import argparse
import gc
import itertools
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from benchmarks.runner.main import main
from benchmarks.runner.run import Run
from legato.cli.table import Table
from legato.core.config import SchedulerConfig
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.token_ids import token_array
from legato.executor.simulated import SimulatedExecutor, VirtualClock
from legato.kv.manager import KVCacheManager
from legato.scheduler.cost_fit import MeasuredStep
from legato.scheduler.scheduler import Scheduler
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel
from legato_lab.simulation.profiles import PROFILES

MINUTES = 4

_COSTS = PROFILES["llama-3-8b-h100"].costs
_MAX_MODEL_LEN = 8192
_BLOCK_SIZE = 16
_NUM_PREFIXES, _SHARED = 10, 512
_APART_S = 1e-6  # between arrivals: no two requests come at the same time


class Scene(msgspec.Struct, frozen=True):
    """Numbers of requests, and the settings of the scheduler.

    Attributes:
        wanted_us: the 99th percentile wanted of `plan`.
        max_num_seqs: more than run, so that prompts wait for time alone; None takes as many.
    """

    name: str
    num_running: int
    num_waiting: int
    wanted_us: float
    settings: dict[str, Any]
    num_tenants: int = 1
    max_num_seqs: int | None = None


_PROMISES = {"itl_slo_s": 0.05, "ttft_slo_s": 3600.0}
_SHEDDING = {"itl_slo_s": 0.05, "ttft_slo_s": 600.0, "shed_load": True}
_PACED = {"tpot_slo_s": 0.02, "ttft_slo_s": 600.0, "shed_load": True}
_STATE_EVERY = 10  # steps
SCENES = (
    Scene("fixed budget", 64, 64, 200.0, {"max_num_batched_tokens": 512}),
    Scene("ITL and TTFT SLO", 64, 64, 200.0, _PROMISES),
    Scene("the same, TPOT SLO too", 64, 64, 200.0, {**_PROMISES, "tpot_slo_s": 0.04}),
    Scene("TPOT SLO, shedding load", 200, 40, 400.0, _PACED, max_num_seqs=256),
    Scene("fixed budget", 256, 10_000, 1000.0, {"max_num_batched_tokens": 2048}),
    Scene("ITL and TTFT SLO", 256, 10_000, 1000.0, _PROMISES),
    Scene("the same, edf", 256, 10_000, 1000.0, {**_PROMISES, "prefill_order": "edf"}),
    Scene("the same, lpm", 256, 10_000, 1000.0, {**_PROMISES, "prefill_order": "lpm"}),
    Scene("the same, all late", 256, 10_000, 1000.0, {**_PROMISES, "ttft_slo_s": 0.1}),
    Scene("the same, shedding load", 256, 10_000, 1000.0, _SHEDDING),
    Scene("the same, 100 tenants", 256, 10_000, 1000.0, _PROMISES, num_tenants=100),
)


class Stage:
    """A scheduler that is kept as busy as the scene says.

    Attributes:
        times_us: key the scheduler's method, value how long each call took.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        num_requests = scene.num_running + scene.num_waiting
        config = SchedulerConfig(
            max_num_seqs=scene.max_num_seqs or scene.num_running,
            max_waiting=num_requests,
            **scene.settings,
        )
        self._scheduler = Scheduler(
            config.resolve(_MAX_MODEL_LEN),
            max_model_len=_MAX_MODEL_LEN,
            kv=KVCacheManager(_num_blocks(scene.num_running), _BLOCK_SIZE),
            step_time=StepTimeModel(_measured_steps()),
        )
        self._clock = VirtualClock()
        self._executor = SimulatedExecutor(
            self._clock, lambda plan: _COSTS.seconds(StepShape.of(plan))
        )
        self._random = random.Random(0)
        self._ids = itertools.count()
        self.times_us: dict[str, list[float]] = {
            "apply": [],
            "plan": [],
            "commit": [],
            "state": [],
        }

    def fill(self) -> None:
        """Let all run and all wait that the scene asks for."""
        while self._scheduler.stats.num_running < self._scene.num_running:
            self.step()
        for times in self.times_us.values():
            times.clear()

    def step(self) -> None:
        stats = self._scheduler.stats
        missing = (
            self._scene.num_running
            + self._scene.num_waiting
            - stats.num_running
            - stats.num_waiting
        )
        for _ in range(missing):
            self._timed("apply", partial(self._apply, self._arrival()))
        plan = self._timed("plan", lambda: self._scheduler.plan(self._clock()))
        self._executor.submit(plan)
        result = self._executor.collect()
        self._timed("commit", lambda: self._scheduler.commit(result, self._clock()))
        if plan.step_id % _STATE_EVERY == 0:
            self._timed("state", lambda: self._scheduler.state(self._clock()))

    def _apply(self, arrival: AddRequest) -> None:
        self._scheduler.apply([arrival], self._clock())

    def _timed(self, name: str, call: Callable[[], Any]) -> Any:
        started_ns = time.perf_counter_ns()
        result = call()
        self.times_us[name].append(1e-3 * (time.perf_counter_ns() - started_ns))
        return result

    def _arrival(self) -> AddRequest:
        """A prompt that begins as a tenth of the others do, and goes on as none of them."""
        number = next(self._ids)
        length = round(self._random.lognormvariate(5.5, 1.2) % 4000 + 1)
        num_shared = min(length, _SHARED)
        shared = (self._random.randrange(_NUM_PREFIXES),) * num_shared
        first = _NUM_PREFIXES + number * _MAX_MODEL_LEN
        return AddRequest(
            request_id=str(number),
            prompt_token_ids=token_array((*shared, *range(first, first + length - num_shared))),
            params=SamplingParams(max_tokens=self._random.randrange(50, 400), seed=0),
            service=ServiceParams(
                slo_class=self._random.choice(["interactive"] * 4 + ["batch"]),
                tenant=f"tenant-{number % self._scene.num_tenants}",
            ),
            arrival_time_s=self._clock() + _APART_S * number,
        )


def _num_blocks(num_running: int) -> int:
    """Enough for most of the time, so that some are preempted."""
    return num_running * 1000 // _BLOCK_SIZE + _MAX_MODEL_LEN // _BLOCK_SIZE


def _measured_steps() -> list[MeasuredStep]:
    shapes = []
    for num_rows, chunk, start in itertools.product((1, 8, 64, 256), (0, 64, 700), (0, 3000)):
        shape = StepShape()
        for _ in range(num_rows):
            shape.add_decode(start + 100)
        if chunk:
            shape.add_prefill(start, chunk, samples=False)
        shapes.append(shape)
    return [(shape, _COSTS.seconds(shape)) for shape in shapes]


class Costs(msgspec.Struct, frozen=True):
    """What a scene's calls took, in microseconds; `plan_p50` is the only median."""

    scene: Scene
    plan_p50: float
    plan_p99: float
    commit_p99: float
    apply_p99: float
    state_p99: float

    @classmethod
    def of(cls, scene: Scene, times_us: dict[str, list[float]]) -> "Costs":
        p99 = {
            name: float(np.percentile(times or [np.nan], 99)) for name, times in times_us.items()
        }
        plan_p50 = float(np.median(times_us["plan"]))
        return cls(scene, plan_p50, p99["plan"], p99["commit"], p99["apply"], p99["state"])


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=2000, help="measured in each scene")
    parser.add_argument(
        "--scenes", type=int, default=len(SCENES), metavar="N", help="the first N of them"
    )


def measure(run: Run) -> None:
    found: list[Costs] = []
    for scene in SCENES[: run.flags.scenes]:
        stage = Stage(scene)
        stage.fill()
        gc.freeze()  # as the engine does once it is built
        for _ in run.track(range(run.flags.steps), scene.name):
            stage.step()
        found.append(Costs.of(scene, stage.times_us))
    run.show(_table(found))
    run.write(found)


def _table(found: list[Costs]) -> Table:
    header = ["scene", "running", "waiting", "plan p50", "p99", "wanted", "commit p99",
              "apply p99", "state p99"]  # fmt: skip
    return Table("Microseconds of a call", header, [_row(costs) for costs in found])


def _row(costs: Costs) -> list[str]:
    scene = costs.scene
    times_us = (costs.plan_p50, costs.plan_p99, scene.wanted_us, costs.commit_p99,
                costs.apply_p99, costs.state_p99)  # fmt: skip
    counts = (str(scene.num_running), f"{scene.num_waiting:,}")
    return [scene.name, *counts, *(f"{us:,.0f}" for us in times_us)]


if __name__ == "__main__":
    main("planning")
