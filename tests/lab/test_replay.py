"""What the replay of a trace says would have been, is what a run without it is like."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec
import pytest

from legato.cli.explain import counterfactual_lines
from legato.cli.main import main
from legato.core.config import SchedulerConfig
from legato.core.outputs import FinishReason
from legato.core.step_record import (
    EngineRecord,
    GrammarReady,
    RequestArrived,
    RequestEnded,
    StepRecord,
)
from legato.engine.loop.engine_loop import EngineLoop
from legato.engine.replay.counterfactuals import Counterfactual, Explained, counterfactuals
from legato.engine.replay.replay import Replay, Token, Without
from legato.engine.replay.window import Window
from legato.observe.traces.attribution import Attribution
from legato.observe.traces.request_story import read_story
from legato.observe.traces.trace_file import (
    JsonlTrace,
    RecordsDropped,
    ReplayBasis,
    TraceHeader,
    TraceLine,
    read_trace,
)
from legato.scheduler.step_costs import ROW_BOUNDS, StepCosts
from legato.scheduler.step_shape import StepShape
from legato_lab.simulation.machine import Machine, MeasuredServer
from legato_lab.simulation.simulated_run import simulate
from legato_lab.simulation.step_errors import ErrorSampler
from legato_lab.simulation.workload import WorkloadRequest
from tests.scheduler.step_times import calibrate

_MAX_LEN, _CACHE_TOKENS = 2048, 20_000
COSTS = StepCosts(step_s=0.01, row_s=(0.0005,) * (len(ROW_BOUNDS) + 1))
FREE = SchedulerConfig(speculative="off", max_num_batched_tokens=256)
PACED = msgspec.structs.replace(FREE, itl_slo_s=0.06)
TWO_IN_FLIGHT = msgspec.structs.replace(FREE, num_steps_in_flight=2)
STREAMS = [WorkloadRequest(0.05 * i, 20, 90) for i in range(3)]
LONG = WorkloadRequest(0.9, 700, 20, tenant="other")
WORKLOAD = [*STREAMS, LONG]


def traced(
    path: Path,
    workload: list[WorkloadRequest],
    config: SchedulerConfig = FREE,
    away: tuple[int, float] = (-1, 0.0),
    *,
    is_calibrated: bool = True,
) -> Path:
    """Record a run in the simulator, whose step `away[0]` takes `away[1]` seconds more."""
    machine = Machine(
        belief=calibrate(COSTS, _MAX_LEN) if is_calibrated else [],
        costs=COSTS,
        max_model_len=_MAX_LEN,
        kv_cache_tokens=_CACHE_TOKENS,
    )
    records: list[EngineRecord] = []
    steps = count()

    def draw(_: ErrorSampler, shape: StepShape) -> float:
        return 1.0 + (away[1] / COSTS.seconds(shape) if next(steps) == away[0] else 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ErrorSampler, "draw", draw)
        server = MeasuredServer(machine=machine, scheduler=config)
        simulate(server, workload, on_records=records.extend)
    basis = ReplayBasis(
        scheduler=config.resolve(_MAX_LEN),
        max_model_len=_MAX_LEN,
        num_blocks=_CACHE_TOKENS // 16,
        block_size=16,
    )
    trace = JsonlTrace(path, TraceHeader(started_s=0.0, unix_s=None, settings={}, basis=basis))
    trace.write(records)
    trace.close()
    return path


def waits(path: Path, request_id: str = "0") -> tuple[list[float], list[float], list[int]]:
    """Return a request's gaps, when its tokens came, and the first token of each delivery."""
    attribution = Attribution(read_story(path, request_id))
    return attribution.gaps(), attribution.came_s, attribution.firsts


def late_token(path: Path) -> tuple[Token, float, float]:
    """Return the token after request 0's longest gap, and when it and the one before came."""
    gaps, came_s, firsts = waits(path)
    place = max(range(len(gaps)), key=gaps.__getitem__)
    before, token = firsts[place : place + 2]
    return Token("0", token), came_s[before], came_s[token]


def explained(path: Path) -> Explained:
    return counterfactuals(path, *late_token(path))


def of(told: Explained, words: str) -> Counterfactual:
    return next(one for one in told.found if one.without.startswith(words))


def really_earlier(recorded: Path, other: Path) -> float:
    """Return how much shorter the wait for the late token really was in another run."""
    token, before_s, came_s = late_token(recorded)
    gaps, _, _ = waits(other)
    return (came_s - before_s) - gaps[token.place - 1]


@pytest.mark.parametrize("config", [FREE, PACED, TWO_IN_FLIGHT])
@pytest.mark.parametrize("words", ["without prompt 3", "without tenant other"])
def test_without_a_prompt_is_as_a_run_without_it(
    tmp_path: Path, config: SchedulerConfig, words: str
) -> None:
    path = traced(tmp_path / "with.jsonl", WORKLOAD, config)
    told = explained(path)
    assert told.num_agreeing == told.num_steps > 0  # nothing taken out: planned as recorded
    really_s = really_earlier(path, traced(tmp_path / "without.jsonl", STREAMS, config))
    assert really_s > 0.02
    assert of(told, words).change_s == pytest.approx(really_s, abs=1e-6)


def test_overlapping_steps_are_replayed_in_the_time_that_they_took(tmp_path: Path) -> None:
    path = traced(tmp_path / "t.jsonl", WORKLOAD, TWO_IN_FLIGHT)
    token, before_s, came_s = late_token(path)
    replay = Replay(Window(path, came_s), 0, token)
    base = replay.run(Without(), 200)
    assert base.plans[: len(replay.recorded_plans)] == replay.recorded_plans
    assert base.wait_s == pytest.approx(came_s - before_s)


def test_with_a_promise_is_as_a_run_with_it(tmp_path: Path) -> None:
    path = traced(tmp_path / "with.jsonl", WORKLOAD)
    one = of(explained(path), "with --itl-slo 70ms")
    promised = msgspec.structs.replace(FREE, itl_slo_s=0.07)
    really_s = really_earlier(path, traced(tmp_path / "promised.jsonl", WORKLOAD, promised))
    assert one.is_on_time
    assert one.num_late == 0
    assert really_s > 0.05
    # The margin of a promise follows from all steps, and the trace ends at the token.
    assert one.change_s == pytest.approx(really_s, abs=0.005)


def test_without_an_interruption_is_as_a_run_without_it(tmp_path: Path) -> None:
    path = traced(tmp_path / "with.jsonl", STREAMS, PACED, away=(50, 0.063))
    told = explained(path)
    quiet = traced(tmp_path / "without.jsonl", STREAMS, PACED)
    assert told.interrupted_s == pytest.approx(0.063, abs=1e-3)
    one = of(told, "without the interruptions")
    assert one.is_on_time
    assert one.change_s == pytest.approx(really_earlier(path, quiet), abs=1e-3)


def test_explain_tells_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = traced(tmp_path / "t.jsonl", WORKLOAD, PACED, away=(62, 0.063))
    assert main(["explain", str(path), "0", "--gaps", "1"]) == 0
    told = capsys.readouterr().out
    assert "without the interruptions of the machine: 63 ms earlier, nobody late (0 %" in told
    assert "the machine took 63 ms away in its steps" in told


def test_what_a_replay_would_warn_of_is_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    tight = msgspec.structs.replace(FREE, itl_slo_s=0.008)
    path = traced(tmp_path / "t.jsonl", WORKLOAD, tight)
    caplog.clear()
    assert main(["explain", str(path), "0"]) == 0
    assert "a replay of" in capsys.readouterr().out
    assert not caplog.records


def test_a_request_of_the_clocks_beginning_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = traced(tmp_path / "t.jsonl", [WorkloadRequest(0.0, 900, 1)])
    assert main(["explain", str(path), "0"]) == 0
    assert "by replays of" in capsys.readouterr().out


def test_a_long_trace_costs_no_more_steps(tmp_path: Path) -> None:
    crowd = [WorkloadRequest(0.2 * i, 300, 10, tenant=f"t{i % 7}") for i in range(200)]
    path = traced(tmp_path / "long.jsonl", [WorkloadRequest(0.0, 20, 1500), *crowd])
    gaps, came_s, _ = waits(path)
    last = len(gaps) - 1
    told = counterfactuals(path, Token("0", last + 1), came_s[last], came_s[last + 1])
    assert told.num_replayed <= 1000
    few = counterfactuals(path, Token("0", last + 1), came_s[last], came_s[last + 1], most_steps=20)
    assert few.num_replayed <= 20


def test_the_file_alone_decides(tmp_path: Path) -> None:
    path = traced(tmp_path / "t.jsonl", WORKLOAD, PACED)
    assert explained(path) == explained(path)


def test_a_trace_without_settings_is_not_replayed(tmp_path: Path) -> None:
    path = traced(tmp_path / "t.jsonl", WORKLOAD)
    token, start_s, came_s = late_token(path)
    rest = path.read_bytes().split(b"\n", 1)[1]
    old = tmp_path / "old.jsonl"
    old.write_bytes(
        b'{"kind":"trace","version":2,"started_s":0,"unix_s":null,"settings":{}}\n' + rest
    )
    with pytest.raises(ValueError, match="older version"):
        counterfactuals(old, token, start_s, came_s)


def altered(path: Path, change: Callable[[TraceLine], list[TraceLine]]) -> Path:
    """Rewrite a trace's lines after its header."""
    header, lines = read_trace(path)
    new = [made for line in list(lines) for made in change(line)]
    trace = JsonlTrace(path, header)
    trace.write(new)
    trace.close()
    return path


def ended_as(request_id: str, reason: FinishReason) -> Callable[[TraceLine], list[TraceLine]]:
    def change(line: TraceLine) -> list[TraceLine]:
        if isinstance(line, RequestEnded) and line.request_id == request_id:
            return [msgspec.structs.replace(line, finish_reason=reason)]
        return [line]

    return change


def test_a_failed_request_is_explained(tmp_path: Path) -> None:
    path = traced(tmp_path / "t.jsonl", WORKLOAD)
    told = explained(path)
    altered(path, ended_as("0", FinishReason.ERROR))
    assert explained(path) == told


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_a_request_that_left_early_leaves_the_replay(tmp_path: Path, reason: FinishReason) -> None:
    path = traced(tmp_path / "t.jsonl", WORKLOAD)
    altered(path, ended_as("1", reason))
    _, came_s, _ = waits(path)
    ends_s = Window(path, came_s[-1]).steps[40].ended_s
    early = altered(path, _early("1", ends_s))
    replay = Replay(Window(early, came_s[-1]), 0, Token("0", 60))
    plans = replay.run(Without(), 100).plans
    assert plans[:60] == replay.recorded_plans[:60]


def _early(request_id: str, ends_s: float) -> Callable[[TraceLine], list[TraceLine]]:
    """Return what lets a request leave at the end of a step, and its chunks with it."""

    def change(line: TraceLine) -> list[TraceLine]:
        if isinstance(line, RequestEnded) and line.request_id == request_id:
            return [msgspec.structs.replace(line, ended_s=ends_s)]
        if isinstance(line, StepRecord) and line.planned_s >= ends_s:
            chunks = tuple(c for c in line.chunks if c.request_id != request_id)
            return [msgspec.structs.replace(line, chunks=chunks)]
        return [line]

    return change


def test_a_prompt_that_another_computes_at_the_same_time_is_replayed(tmp_path: Path) -> None:
    """As the choices of a request with n > 1: they are admitted before the shared blocks are."""
    alike = [WorkloadRequest(0.9, 1100, 20, hash_ids=(1, 2)) for _ in range(2)]
    path = traced(tmp_path / "t.jsonl", [*STREAMS, *alike])
    _, came_s, _ = waits(path)
    replay = Replay(Window(path, came_s[-1]), 0, Token("0", 89))
    starts = [start for plan in replay.recorded_plans for name, start, _ in plan if name == "4"]
    assert starts[0] > 1000
    assert replay.run(Without(), 200).plans[: len(replay.recorded_plans)] == replay.recorded_plans


def test_an_engine_that_knows_no_step_times_plans_as_such(tmp_path: Path) -> None:
    config = msgspec.structs.replace(FREE, bounds_gaps=True)
    crowd = [WorkloadRequest(0.0, 20, 90), WorkloadRequest(0.015, 300, 20)]
    path = traced(tmp_path / "t.jsonl", crowd, config, is_calibrated=False)
    _, came_s, _ = waits(path)
    window = Window(path, came_s[-1])
    assert (window.steps[0].predicted_s is None) != (window.steps[-1].predicted_s is None)
    replay = Replay(window, 0, Token("0", 89))
    assert replay.run(Without(), 100).plans == replay.recorded_plans


def test_a_replay_with_another_wait_tells_nothing(tmp_path: Path) -> None:
    """The bound of steps without a promise follows from costs that few sizes of steps hide."""
    config = msgspec.structs.replace(FREE, bounds_gaps=True, max_num_batched_tokens=2048)
    crowd = [WorkloadRequest(0.001 * i, 1500, 30) for i in range(13)]
    path = traced(tmp_path / "t.jsonl", crowd, config)
    _, came_s, _ = waits(path, "5")
    with pytest.raises(ValueError, match=r"waits \d+ ms, and not \d+"):
        counterfactuals(path, Token("5", 1), *came_s[:2])


def test_a_refused_request_is_not_replayed(tmp_path: Path) -> None:
    path = traced(tmp_path / "t.jsonl", WORKLOAD)
    told = explained(path)

    def change(line: TraceLine) -> list[TraceLine]:
        if not isinstance(line, RequestArrived) or line.request_id != "3":
            return [line]
        came = msgspec.structs.replace(line, request_id="refused")
        reason = FinishReason.REFUSED
        end = RequestEnded(
            request_id="refused",
            ended_s=line.taken_s,
            finish_reason=reason,
            num_output_tokens=0,
            num_cached_tokens=0,
            error="full",
        )
        return [came, end, line]

    assert explained(altered(path, change)) == told


def test_a_request_is_replayed_from_the_compiling_of_its_grammar_on(tmp_path: Path) -> None:
    path = traced(tmp_path / "t.jsonl", WORKLOAD)
    told = explained(path)

    def change(line: TraceLine) -> list[TraceLine]:
        if not isinstance(line, RequestArrived) or line.request_id != "3":
            return [line]
        early = msgspec.structs.replace(line, arrived_s=0.3, taken_s=0.3)
        return [early, GrammarReady(request_id="3", ready_s=line.taken_s, compile_s=0.5)]

    again = explained(altered(path, change))
    assert again.num_agreeing == again.num_steps
    one, other = (of(each, "without prompt").change_s for each in (again, told))
    assert one == pytest.approx(other)


def test_a_trace_with_missing_records_is_not_replayed(tmp_path: Path) -> None:
    path = traced(tmp_path / "t.jsonl", WORKLOAD)

    def change(line: TraceLine) -> list[TraceLine]:
        is_first = isinstance(line, StepRecord) and line.step_id == 3
        return [RecordsDropped(num_records=5)] if is_first else [line]

    altered(path, change)
    with pytest.raises(ValueError, match="missing"):
        explained(path)


def test_what_has_no_result_is_not_called_nothing() -> None:
    lines = counterfactual_lines(Explained([], None, 0.0, 9, 9, 2000, 3), "its first token")
    assert lines[1:] == ["  no result for 3 more within 2000 steps"]


def test_requests_that_cannot_begin_end_a_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = traced(tmp_path / "t.jsonl", WORKLOAD)
    token, _, came_s = late_token(path)
    replay = Replay(Window(path, came_s), 0, token)
    monkeypatch.setattr(EngineLoop, "_plan", lambda *_: None)
    assert replay.run(Without(), 100).wait_s is None
