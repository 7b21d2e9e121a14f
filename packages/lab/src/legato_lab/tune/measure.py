"""Measures the idle engine: a calibration, and steps of candidate budgets.

It runs in a process of its own, so that the model's memory is free again for the servers that
follow.
"""

import itertools
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import msgspec

from legato.core.config import EngineConfig
from legato.engine.assembly.builder import load_runtime
from legato.engine.calibration.calibration import Calibration
from legato.scheduler.cost_fit import MeasuredStep
from legato_lab.simulation.clients import Delays
from legato_lab.simulation.machine import Machine, MeasuredServer
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.simulated_run import simulate
from legato_lab.simulation.workload import Workload

BUDGETS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_REPEATS = 3
_LONGEST_STEP_S = 2.0


class TypicalLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The decodes in the step of a chunk of prefill, and the chunk's position.

    Attributes:
        num_streams: that decode at once, on average.
        context: keys that each of them reads, on average.
        start: half of a prompt, the average start of a chunk.
    """

    num_streams: int
    context: int
    start: int

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> "TypicalLoad":
        """Compute the load by Little's law. Args: records: with at least one finished request."""
        finished = [record for record in records if record.status == "ok"]
        decoding_s = sum(r.token_times_s[-1] - r.token_times_s[0] for r in finished)
        duration_s = max(r.token_times_s[-1] for r in finished)
        prompts = [r.request.num_prompt_tokens for r in finished]
        outputs = [r.request.num_output_tokens for r in finished]
        return cls(
            num_streams=max(1, round(decoding_s / duration_s)),
            context=round(statistics.mean(prompts) + statistics.mean(outputs) / 2),
            start=round(statistics.mean(prompts) / 2),
        )


class BudgetTime(msgspec.Struct, frozen=True):
    """Attributes: measured_s: the median of a few steps of `num_tokens` on the idle engine."""

    num_tokens: int
    measured_s: float


class IdleMachine(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of an idle machine.

    Attributes:
        machine: without anything about a server on it.
        about: what the figures depend on: model, dtype, device, ...
        steps: the steps measured with all budgets.
    """

    machine: Machine
    about: dict[str, str]
    load: TypicalLoad
    budgets: list[BudgetTime]
    steps: list[MeasuredStep]


def measure_idle(config: EngineConfig, workload: Workload) -> IdleMachine:
    """Calibrate the engine, for later starts too, and measure candidate budgets.

    Args:
        workload: fits into the model's context.

    Raises:
        ConfigError: settings that contradict each other, the model or the machine.
        UnsupportedModelError: a checkpoint that cannot be run.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measure, config, workload).result()


def _measure(config: EngineConfig, workload: Workload) -> IdleMachine:
    runtime = load_runtime(config)
    step_times = runtime.step_times
    calibration = step_times.calibration()
    steps = step_times.measure(calibration).steps
    machine = Machine.fit(
        steps,
        [],
        rows=runtime.rows,
        delays=Delays(),
        max_model_len=runtime.max_model_len,
        kv_cache_tokens=runtime.kv.num_blocks * runtime.kv.block_size,
    )
    # Refused requests would not count in the load.
    taking_all = msgspec.structs.replace(config.scheduler, shed_load=False)
    server = MeasuredServer(
        machine=machine,
        scheduler=taking_all,
        enable_prefix_caching=config.cache.enable_prefix_caching,
    )
    load = TypicalLoad.of(simulate(server, workload).records)
    most = runtime.config.scheduler.most_batched_tokens(
        runtime.max_model_len,
        runtime.model.device.type,
        has_windows=runtime.kv.windows is not None,
    )
    by_budget = _measure_budgets(calibration, load, most)
    times = [BudgetTime(budget, _median_s(steps)) for budget, steps in by_budget.items()]
    return IdleMachine(
        machine=machine,
        about=step_times.file.about,
        load=load,
        budgets=times,
        steps=list(itertools.chain.from_iterable(by_budget.values())),
    )


def _measure_budgets(
    calibration: Calibration, load: TypicalLoad, most: int
) -> dict[int, list[MeasuredStep]]:
    """Measure steps by token budget, up to `most` or the first that takes too long."""
    measured: dict[int, list[MeasuredStep]] = {}
    for budget in BUDGETS:
        if not load.num_streams < budget <= most:
            continue
        measured[budget] = [_step(calibration, load, budget) for _ in range(_REPEATS)]
        if _median_s(measured[budget]) > _LONGEST_STEP_S:
            break
    return measured


def _median_s(steps: Sequence[MeasuredStep]) -> float:
    return statistics.median(seconds for _, seconds in steps)


def _step(calibration: Calibration, load: TypicalLoad, budget: int) -> MeasuredStep:
    return calibration.measure(
        num_rows=load.num_streams,
        context=load.context,
        start=load.start,
        num_tokens=budget - load.num_streams,
    )
