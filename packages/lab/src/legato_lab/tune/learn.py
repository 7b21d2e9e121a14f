"""Measures a machine: first the idle engine, then the real server under a part of the workload."""

import time
from collections.abc import Callable

import msgspec

from legato.core.config import EngineConfig
from legato.scheduler.cost_fit import MOST_DISTURBED
from legato_lab.simulation.machine import Machine
from legato_lab.simulation.workload import RandomPrompts, Workload
from legato_lab.tune.budget_table import BudgetRow, budget_rows
from legato_lab.tune.measure import TypicalLoad, measure_idle
from legato_lab.tune.real import record_real

Tell = Callable[[str], None]
"""Called with a description of the current work."""


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that can be simulated.

    Attributes:
        load: of a typical step with prefill under the workload.
        about: what the figures depend on: model, dtype, device, ...
        budgets: step times of candidate token budgets beside that load.
        wall_s: time that the measurements took.
    """

    machine: Machine
    about: dict[str, str]
    load: TypicalLoad
    budgets: list[BudgetRow]
    wall_s: float


def learn(config: EngineConfig, workload: Workload, prompts: RandomPrompts, tell: Tell) -> Learned:
    """Measure the machine under this configuration.

    Args:
        workload: fits into the model's context.

    Raises:
        ConfigError: settings that contradict each other, the model or the machine.
        UnsupportedModelError: a checkpoint that cannot be run.
    """
    started_s = time.monotonic()
    tell("measuring the idle engine")
    idle = measure_idle(config, workload)
    tell(f"recording {len(workload)} requests on the real engine")
    run, recording = record_real(config, workload, prompts, "recording")
    machine = Machine.fit(
        idle.machine.belief,
        recording.measured_steps(),
        larger=idle.steps,
        rows=idle.machine.costs.rows,
        delays=recording.delays(run.records, run.start_s),
        max_model_len=idle.machine.max_model_len,
        kv_cache_tokens=idle.machine.kv_cache_tokens,
    )
    if machine.errors.disturbed > MOST_DISTURBED:
        tell(
            f"{machine.errors.disturbed:.0%} of the recorded steps took far longer than others "
            "like them: something else ran on the machine, and what follows is for such a machine"
        )
    return Learned(
        machine=machine,
        about=idle.about,
        load=idle.load,
        budgets=budget_rows(machine, idle.load, idle.budgets, config.scheduler.itl_slo_s),
        wall_s=time.monotonic() - started_s,
    )
