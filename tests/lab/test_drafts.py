"""Drafts in simulation: as often right as was told, and what becomes of streams by them."""

from pathlib import Path

import msgspec
import pytest

from legato.cli.main import main
from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.step_record import EngineRecord, StepRecord
from legato.observe.traces.trace_file import read_trace
from legato.scheduler.cost_fit import fit
from legato_lab.simulation.drafts import Acceptance
from legato_lab.simulation.fleet import SimulatedFleet, Split
from legato_lab.simulation.fleet_run import simulate_fleet
from legato_lab.simulation.machine import MeasuredServer
from legato_lab.simulation.machine_file import load_machine
from legato_lab.simulation.profiled_server import SimulatedServer, calibrate
from legato_lab.simulation.published import rooflines
from legato_lab.simulation.simulated_run import Simulable, SimulatedRun, simulate
from legato_lab.simulation.workload import Workload, WorkloadRequest, with_poisson_arrivals
from legato_lab.workload.mixes import draw_mix
from tests.lab.simulated import CPU
from tests.scheduler.step_times import step_shape

CHAT = with_poisson_arrivals(draw_mix("chat", 16, seed=0), 2.0, seed=0)
LONG = [WorkloadRequest(20.0 * place, 50, 600) for place in range(4)]
_SIX = SchedulerConfig(speculative=6)


def server(acceptance: Acceptance | None, scheduler: SchedulerConfig = _SIX) -> SimulatedServer:
    return SimulatedServer(profile=CPU, scheduler=scheduler, acceptance=acceptance)


def recorded(served: Simulable, workload: Workload) -> tuple[SimulatedRun, list[StepRecord]]:
    records: list[EngineRecord] = []
    run = simulate(served, workload, on_records=records.extend)
    return run, [record for record in records if isinstance(record, StepRecord)]


@pytest.mark.parametrize(
    "told", [Acceptance.even(0.7), Acceptance((0.9, 0.6, 0.3)), Acceptance((0.8,) * 6, share=0.5)]
)
def test_drafts_are_right_as_often_as_told(told: Acceptance) -> None:
    """And what is learned of a run is what the run was told."""
    run, steps = recorded(server(told), LONG)
    assert [record.num_tokens for record in run.records] == [600] * 4
    learned = Acceptance.of_steps(steps)
    assert len(learned.chances) == min(6, len(told.chances))
    for chance, right in zip(learned.chances[:3], told.chances, strict=False):
        assert chance == pytest.approx(right, abs=0.06)
    # The last tokens of a request have nothing behind them to draft.
    assert learned.share == pytest.approx(told.share, abs=0.06)


def test_right_drafts_make_streams_faster_and_wrong_ones_hardly_slower() -> None:
    auto = SchedulerConfig(itl_slo_s=0.15)
    durations = []
    for acceptance in (None, Acceptance.even(0.0), Acceptance.even(0.5), Acceptance.even(0.9)):
        run, steps = recorded(server(acceptance, auto), LONG[:1])
        durations.append(run.duration_s)
        has_drafts = any(step.num_draft_tokens for step in steps)
        assert has_drafts == (acceptance is not None and acceptance.chances[0] > 0.0)
    off, never, sometimes, often = durations
    assert never == pytest.approx(off, rel=0.05)
    assert often < 0.6 * sometimes < 0.6 * off


def test_which_drafts_are_right_is_the_same_whatever_the_schedule() -> None:
    """A wrong draft stands at the same place with any other drafts."""
    wrong: list[set[int]] = []
    for count in (2, 5):
        config = SchedulerConfig(speculative=count)
        _, steps = recorded(server(Acceptance.even(0.6), config), LONG[:1])
        chunks = [c for step in steps for c in step.chunks if c.num_accepted < c.num_drafts]
        wrong.append({c.start + 1 + c.num_accepted for c in chunks})
    fewer, more = wrong
    assert fewer < more  # a token that no draft stood for may not have been guessed


@pytest.mark.parametrize("split", [Split(both=2), Split(prefill=1, decode=1)])
def test_fleets_draft_too(split: Split) -> None:
    def run(acceptance: Acceptance | None) -> float:
        fleet = SimulatedFleet(
            server=server(acceptance), split=split, kv_token_bytes=CPU.kv_token_bytes
        )
        done = simulate_fleet(fleet, CHAT)
        assert all(record.status == "ok" for record in done.records)
        return sum(r.token_times_s[-1] - r.token_times_s[0] for r in done.records)

    assert run(Acceptance.even(0.8)) < 0.8 * run(None)


def test_machines_draft_too() -> None:
    machine = load_machine("smollm2-135m-cpu")
    costs = fit(machine.belief, machine.costs.rows)
    shape = step_shape(num_decodes=2, context=3000)
    shape.add_drafts(3000, 12)
    assert costs.seconds(shape) == pytest.approx(machine.costs.seconds(shape), rel=0.1)
    plain = MeasuredServer(machine=machine, scheduler=_SIX)
    drafting = msgspec.structs.replace(plain, acceptance=Acceptance.even(0.8))
    assert recorded(drafting, LONG)[0].duration_s < 0.9 * recorded(plain, LONG)[0].duration_s


def test_what_a_calibration_would_tell_of_drafts() -> None:
    settings = {"max_model_len": 4096, "max_num_seqs": 64, "noise": 0.0, "seed": 0}
    plain = calibrate(CPU.costs, **settings)  # type: ignore[arg-type]
    drafting = calibrate(CPU.costs, most_drafts=64, **settings)  # type: ignore[arg-type]
    assert not any(shape.num_draft_rows for shape, _ in plain)
    assert [seconds for _, seconds in drafting[: len(plain)]] == [seconds for _, seconds in plain]
    assert max(shape.num_draft_rows for shape, _ in drafting) <= 64
    shape = step_shape(num_decodes=3, context=700)
    shape.add_drafts(700, 5)
    assert fit(drafting).seconds(shape) == pytest.approx(CPU.costs.seconds(shape), rel=0.02)


def test_a_draft_costs_its_arithmetic_on_a_roofline() -> None:
    """A stream's draft is far cheaper than another stream, whose keys would be read."""
    costs = rooflines()["llama-3-8b-h100"].costs
    stream = step_shape(num_decodes=1, context=8000)
    drafting, streams = stream.copy(), step_shape(num_decodes=2, context=8000)
    drafting.add_drafts(8000, 1)
    step_s = costs.seconds(stream)
    assert step_s < costs.seconds(drafting) < step_s + 0.2 * (costs.seconds(streams) - step_s)


def test_what_cannot_be_learned_is_told() -> None:
    _, steps = recorded(server(None), LONG[:1])
    with pytest.raises(ConfigError, match="of 0 drafts"):
        Acceptance.of_steps(steps)
    with pytest.raises(ConfigError, match=r"chance in \[0, 1\), got 1.0"):
        Acceptance.even(1.0)


def test_simulate_drafts_as_told_or_as_a_trace_was(tmp_path: Path) -> None:
    common = ["simulate", "--workload", "prompt p50=50, output p50=200", "--num-requests", "8",
              "--rate", "1", "--policy", "fixed:512", "-o", str(tmp_path)]  # fmt: skip

    def accepted(name: str, *flags: str) -> float:
        trace = tmp_path / f"{name}.jsonl"
        assert main([*common, "--trace", str(trace), *flags]) == 0
        steps = [line for line in read_trace(trace)[1] if isinstance(line, StepRecord)]
        drafts = sum(step.num_draft_tokens for step in steps)
        return sum(step.num_accepted_tokens for step in steps) / max(1, drafts)

    assert accepted("off") == 0.0
    told = accepted("told", "--acceptance", "0.8", "--speculative", "3")
    assert 0.55 < told < 0.75  # (0.8 + 0.8 ** 2 + 0.8 ** 3) / 3 = 0.65
    trace = str(tmp_path / "told.jsonl")
    assert accepted("learned", "--acceptance", trace, "--speculative", "3") == pytest.approx(
        told, abs=0.06
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--speculative", "4"], "--speculative needs --acceptance"),
        (["--acceptance", "1.5"], "chance in [0, 1)"),
        (["--acceptance", "no.jsonl"], "no.jsonl"),
    ],
)
def test_what_simulate_refuses(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args = ["simulate", "--workload", "chat", "--num-requests", "2", "-o", str(tmp_path)]
    assert main([*args, *flags]) != 0
    assert told in capsys.readouterr().err
