"""What a trace shows about a machine: a simulated one, about which everything is known."""

from pathlib import Path

import msgspec
import pytest

from legato.core.config import SchedulerConfig
from legato.core.slo import SloClass
from legato.core.step_record import EngineRecord
from legato.observe.traces.trace_file import JsonlTrace, TraceHeader
from legato_lab.simulation.machine import Machine, MeasuredServer
from legato_lab.simulation.simulated_run import SimulatedRun, simulate
from legato_lab.simulation.workload import Workload, WorkloadRequest, with_poisson_arrivals
from legato_lab.tune.recording import Recording
from legato_lab.workload.mixes import draw_mix
from legato_lab.workload.traces import read_workload
from tests.lab.tune.machines import CALIBRATION, CPU, DELAYS

WORKLOAD = with_poisson_arrivals(draw_mix("mixed", 60, seed=1), 1.0, seed=1)
START_S = 0.0  # of the virtual clock


def record(
    scheduler: SchedulerConfig, workload: Workload, machine: Machine = CPU
) -> tuple[SimulatedRun, list[EngineRecord]]:
    """The run of a workload, and the engine's records of it."""
    records: list[EngineRecord] = []
    server = MeasuredServer(machine=machine, scheduler=scheduler)
    return simulate(server, workload, on_records=records.extend), records


def test_the_machine_is_found_again() -> None:
    slower = msgspec.structs.replace(
        CPU, costs=type(CPU.costs).from_vector([1.2 * cost for cost in CPU.costs.vector])
    )
    run, records = record(SchedulerConfig(max_num_batched_tokens=256), WORKLOAD, slower)
    recording = Recording.of(records)
    steps = recording.measured_steps()
    assert len(steps) == run.num_steps
    delays = recording.delays(run.records, START_S)
    assert msgspec.structs.astuple(delays) == pytest.approx(
        msgspec.structs.astuple(DELAYS), rel=0.02, abs=2e-6
    )
    found = Machine.fit(
        CALIBRATION, steps, delays=delays, max_model_len=8192, kv_cache_tokens=131_072
    )
    seconds = sum(seconds for _, seconds in steps)
    expected_s = sum(found.errors.quantile(shape, 0.5) * found.costs.seconds(shape)
                     for shape, _ in steps)  # fmt: skip
    assert expected_s == pytest.approx(seconds, rel=0.03)


def test_what_came_before_does_not_count() -> None:
    run, records = record(SchedulerConfig(), WORKLOAD)
    late = Recording.of(records, since_s=run.duration_s / 2)
    assert 0 < len(late.steps) < run.num_steps
    assert all(arrival.arrived_s >= run.duration_s / 2 for arrival in late.arrivals)


def test_recorded_traffic_is_a_workload_again(tmp_path: Path) -> None:
    """But for when each request came: on its way to the scheduler, a little passes."""
    workload = [
        WorkloadRequest(0.0, 100, 5),
        WorkloadRequest(0.5, 2000, 3, slo_class="gold", priority=2),
        WorkloadRequest(1.0, 7, 9, slo_class="batch"),
    ]
    _, records = record(SchedulerConfig(slo_classes={"gold": SloClass(itl_s=1.0)}), workload)
    trace = JsonlTrace(tmp_path / "trace.jsonl", TraceHeader.now({}))
    trace.write(records)
    trace.close()
    found = read_workload(tmp_path / "trace.jsonl")
    at_s = [request.arrival_s for request in found]
    assert at_s == pytest.approx([0.0, 0.5, 1.0], abs=0.01)
    moved = [msgspec.structs.replace(r, arrival_s=0.0) for r in found]
    assert moved == [msgspec.structs.replace(r, arrival_s=0.0) for r in workload]
