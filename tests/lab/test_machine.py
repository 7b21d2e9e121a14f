"""Machines as they were measured, simulated."""

from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.engine.calibration.calibration_file import shape_counts
from legato.scheduler.cost_fit import MeasuredStep
from legato.scheduler.step_costs import ROW_BOUNDS, StepCosts
from legato.scheduler.step_shape import StepShape
from legato_lab.simulation.clients import Delays
from legato_lab.simulation.machine import MeasuredServer
from legato_lab.simulation.machine_file import load_machine, write_machine
from legato_lab.simulation.simulated_run import simulate
from legato_lab.simulation.step_errors import ErrorSampler, StepErrors
from legato_lab.simulation.workload import WorkloadRequest
from tests.lab.tune.machines import CPU, DELAYS

DECODE, PREFILL = StepShape(), StepShape()
DECODE.add_decode(100)
PREFILL.add_prefill(0, 100, samples=False)


def told(steps: list[MeasuredStep]) -> list[tuple[dict[str, float], float]]:
    return [(shape_counts(shape), seconds) for shape, seconds in steps]


def test_what_passes_outside_of_steps_is_in_the_clients_times() -> None:
    machine = msgspec.structs.replace(
        CPU,
        costs=StepCosts(step_s=1.0, row_s=(0.0,) * (len(ROW_BOUNDS) + 1)),
        errors=StepErrors(),
        delays=Delays(
            turnaround_s=0.25,
            turnaround_token_s=0.5,
            intake_s=0.1,
            intake_token_s=0.01,
            delivery_s=0.02,
            delivery_token_s=0.003,
        ),
    )
    server = MeasuredServer(machine=machine, scheduler=SchedulerConfig(prefill_order="fcfs"))
    run = simulate(server, [WorkloadRequest(0.0, 10, 2), WorkloadRequest(0.01, 9, 2)])
    # Both are taken at 0.2 s; the first step ends at 1.45 s, the second 0.25 + 2 * 0.5 + 1 later.
    assert run.records[0].token_times_s == pytest.approx([1.47, 3.72])
    assert run.records[1].token_times_s == pytest.approx([1.473, 3.723])


def test_a_short_prompt_overtakes_a_long_one_on_its_way() -> None:
    machine = msgspec.structs.replace(CPU, delays=Delays(intake_token_s=1e-3))
    server = MeasuredServer(machine=machine, scheduler=SchedulerConfig(max_num_seqs=1))
    long, short = simulate(
        server, [WorkloadRequest(0.0, 2000, 3), WorkloadRequest(0.1, 100, 3)]
    ).records
    assert short.token_times_s[-1] < long.token_times_s[0]


@given(
    ratios=st.lists(st.floats(0.5, 3.0), min_size=1, max_size=300, unique=True),
    seed=st.integers(0, 3),
)
def test_errors_come_together_as_they_were_measured(ratios: list[float], seed: int) -> None:
    costs = StepCosts(step_s=0.5, row_s=(0.0,) * (len(ROW_BOUNDS) + 1))
    errors = StepErrors.of([(DECODE, 0.5), *((PREFILL, 0.5 * ratio) for ratio in ratios)], costs)
    sampler = ErrorSampler(errors, seed)
    places = []
    for _ in range(100):
        places.append(errors.prefills.index(sampler.draw(PREFILL)))
        assert sampler.draw(DECODE) == 1.0
    num_jumps = sum(after != before + 1 for before, after in pairwise(places))
    # A block ends after 32, or with what was measured.
    assert num_jumps <= 100 / 32 + places.count(len(ratios) - 1)
    assert errors.quantile(PREFILL, 0.5) == pytest.approx(np.median(ratios))


def test_steps_that_something_else_held_up_are_counted() -> None:
    assert StepErrors(decodes=(1.0, 1.2), prefills=(0.9, 1.1, 2.1)).disturbed == 0.2


def test_a_machine_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "machine.json"
    write_machine(path, CPU, {"model": "made up"})
    found = load_machine(str(path))
    assert told(found.belief) == told(CPU.belief)
    assert msgspec.structs.replace(found, belief=[]) == msgspec.structs.replace(CPU, belief=[])
    assert CPU.delays == DELAYS


def test_delays_are_not_negative() -> None:
    with pytest.raises(ConfigError, match="delivery_s"):
        Delays(delivery_s=-1.0)
