"""`legato demo`."""

import io
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from legato.core.config import Policy, SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.step_record import ChunkRecord
from legato.scheduler.step_time import StepTimeModel
from legato_lab.demo.comparison import verdict
from legato_lab.demo.play import play
from legato_lab.demo.stage import DemoRun
from legato_lab.demo.toy import toy_steps
from legato_lab.demo.traffic import Traffic, sized_traffic
from legato_lab.demo.view import View, strip
from legato_lab.simulation.profiles import load_profile
from tests.forks.start import run
from tests.scheduler.step_times import calibrate

POLICIES = ("whole prompts", "prefill first, 512 tokens", "stall-free, 512 tokens", "stall-free, ")


@pytest.fixture(scope="module")
def machine() -> StepTimeModel:
    return StepTimeModel(calibrate(load_profile("smollm2-135m-cpu").costs, 8192))


def toy(policy: Policy) -> list[dict[str, tuple[int, int, int]]]:
    """For each step: key request, value start, end and tokens sampled."""
    return [
        {c.request_id: (c.start, c.start + c.num_tokens, c.num_samples) for c in step.chunks}
        for step in toy_steps(policy)
    ]


def test_the_textbooks_example() -> None:
    """R1 has 10 prompt tokens, R2 has 6, a step has 4; each generates 4."""
    assert toy("stall-free") == [
        {"R1": (0, 4, 0)},
        {"R1": (4, 8, 0)},
        {"R1": (8, 10, 1), "R2": (0, 2, 0)},
        {"R1": (10, 11, 1), "R2": (2, 5, 0)},
        {"R1": (11, 12, 1), "R2": (5, 6, 1)},
        {"R1": (12, 13, 1), "R2": (6, 7, 1)},
        {"R2": (7, 8, 1)},
        {"R2": (8, 9, 1)},
    ]


def test_the_same_with_prefill_first() -> None:
    """R1 stands still in the fourth step."""
    assert toy("prefill-first")[2:5] == [
        {"R1": (8, 10, 1), "R2": (0, 2, 0)},
        {"R2": (2, 6, 1)},
        {"R1": (10, 11, 1), "R2": (6, 7, 1)},
    ]


def test_traffic_is_sized_to_the_machine(machine: StepTimeModel) -> None:
    fast, slow = sized_traffic(machine, 8192), StepTimeModel(_slower(10.0))
    assert 250 <= sized_traffic(slow, 8192).long_prompt < fast.long_prompt <= 7000
    assert sized_traffic(slow, 8192).itl_slo_s == pytest.approx(10 * fast.itl_slo_s, rel=0.1)
    given = sized_traffic(machine, 8192, itl_slo_s=0.2, long_prompt=600)
    assert (given.itl_slo_s, given.long_prompt) == (0.2, 600)


def _slower(factor: float) -> list:  # type: ignore[type-arg]
    steps = calibrate(load_profile("smollm2-135m-cpu").costs, 8192)
    return [(shape, factor * seconds) for shape, seconds in steps]


def test_a_prompt_must_fit(machine: StepTimeModel) -> None:
    with pytest.raises(ConfigError, match="at most 960"):
        sized_traffic(machine, 1024, long_prompt=1000)


def test_a_strip_shows_a_stall_in_red() -> None:
    """Ten tokens a second, none from the second second on, and ten again from the fourth on."""
    times_s = [0.05 + i / 10 for i in [*range(20), *range(40, 50)]]
    drawn = strip(times_s, (0.0, 6.0), 30, now_s=5.0, slo_s=0.5)
    colors = [str(span.style) for span in drawn.spans]
    assert "·" not in drawn.plain[:10] + drawn.plain[20:25]
    assert drawn.plain[10:20] == "·" * 10
    assert drawn.plain[25:] == " " * 5
    assert [i for i, color in enumerate(colors) if "red" in color] == [*range(10, 20)]


TRAFFIC = Traffic(num_streams=1, long_prompt=600, itl_slo_s=0.1)


def serve(run: DemoRun, gap_s: float, ttft_s: float) -> None:
    """As if its one stream had a token each 10 ms, but one gap while the prompt was computed."""
    sent_s = run.started_s + 0.5
    before_s = [run.started_s + 0.01 * i for i in range(50)]
    run.token_times_s = [[*before_s, *(before_s[-1] + gap_s + 0.01 * i for i in range(500))]]
    run.long_sent_s, run.long_first_s, run.ended_s = sent_s, sent_s + ttft_s, sent_s + 5


def test_tokens_of_one_step_have_no_gap_between_them() -> None:
    run = DemoRun("drafts", TRAFFIC)
    serve(run, gap_s=0.05, ttft_s=2.0)
    alone = run.result()
    run.token_times_s = [[at_s for at_s in times for _ in range(3)] for times in run.token_times_s]
    result = run.result()
    for during in (False, True):
        assert result.itl_s(during=during).tolist() == alone.itl_s(during=during).tolist()
        expected = 3 * alone.tokens_per_s(during=during)
        assert result.tokens_per_s(during=during) == pytest.approx(expected)


def test_the_latest_step_says_what_was_drafted() -> None:
    chunks = (
        ChunkRecord("a", 9, 5, 5, "verify", None, "own", 3),
        ChunkRecord("b", 9, 1, 1, "decode", None),
        ChunkRecord("c", 0, 40, 0, "prefill", "token_budget"),
    )
    run = DemoRun("drafts", TRAFFIC)
    [step] = toy_steps("stall-free")[:1]
    run.take([], [msgspec.structs.replace(step, chunks=chunks, ended_s=run.started_s)])
    shown = io.StringIO()
    view = View("title")
    view.begin(run, "1 of 1")
    Console(file=shown, width=120).print(view.at(run.started_s + 0.1, 120))
    assert "2 streams with 4 drafts (3 right) and 40 prompt tokens" in shown.getvalue()


def test_the_verdict_tells_the_price() -> None:
    runs = [DemoRun(name, TRAFFIC) for name in ("whole", "promised")]
    serve(runs[0], gap_s=2.0, ttft_s=2.0)
    serve(runs[1], gap_s=0.09, ttft_s=3.0)
    told = verdict(runs)
    assert "stopped the streams for 2.00 s" in told
    assert "Under a promise of 100 ms, no stream waited longer than 90 ms" in told
    assert "after 3.00 s, 1.5 times as long" in told
    serve(runs[1], gap_s=0.09, ttft_s=2.0)
    assert "no later" in verdict(runs)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_who_cancels_has_what_ran_before(is_terminal: bool) -> None:
    shown = io.StringIO()
    view = View("title")

    class Impatient:
        def serve(self, run: DemoRun, _config: SchedulerConfig) -> None:
            if len(view.runs) == 3:
                raise KeyboardInterrupt
            serve(run, gap_s=1.0, ttft_s=1.0)

    stage: Any = Impatient()
    with pytest.raises(KeyboardInterrupt):
        play(view, stage, TRAFFIC, Console(file=shown, force_terminal=is_terminal, width=100))
    assert [run.name for run in view.runs] == list(POLICIES[:2])
    assert is_terminal or "2 of 4, prefill first" in shown.getvalue()


def test_the_whole(tmp_path: Path) -> None:
    """On the real model: four policies, a table, a picture with four panels, and the terminal's."""
    flags = ["--output", tmp_path / "demo.svg", "--terminal-svg", tmp_path / "terminal.svg",
             "--long-prompt", "300", "--calibration-dir", tmp_path, "--num-threads", "1",
             "--kv-cache-memory", "512M"]  # fmt: skip
    done = run("legato", "demo", *map(str, flags))
    assert done.returncode == 0, done.stderr
    for policy in POLICIES:
        assert len(re.findall(f"{policy}.*: longest wait", done.stdout)) >= 1
    assert "8 streams and a prompt of 300 tokens" in done.stdout
    assert re.search("Under a promise of .*, no stream waited longer than .*", done.stdout)
    picture = (tmp_path / "demo.svg").read_text()
    assert len(re.findall(r'id="axes_\d+"', picture)) == len(POLICIES)
    terminal = (tmp_path / "terminal.svg").read_text().replace("&#160;", " ")
    assert all(policy in terminal for policy in POLICIES)
    assert "stream 8" in terminal
    assert "url(http" not in terminal


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--output", "demo.doc"], ".png, .svg, .pdf"),
        (["--output", "nowhere/demo.png"], "no folder"),
        (["--itl-slo", "soon"], "duration"),
    ],
)
def test_nonsense_is_told_before_anything_is_loaded(flags: list[str], told: str) -> None:
    done = run("legato", "demo", *flags)
    assert done.returncode == 2
    assert told in done.stderr
