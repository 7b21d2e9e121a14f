"""Mixes and files as a user chooses them."""

import os
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest

from legato.core.errors import ConfigError
from legato_lab.simulation.workload import mean_rate_per_s
from legato_lab.workload.choice import WorkloadChoice
from legato_lab.workload.mixes import MIXES, draw_mix
from legato_lab.workload.notes import NO_NOTES
from legato_lab.workload.traces import Reading
from tests.lab.test_traces import AZURE, VIDUR


@pytest.mark.parametrize("name", MIXES)
def test_mixes_are_reproducible(name: str) -> None:
    assert draw_mix(name, 50, seed=1) == draw_mix(name, 50, seed=1)
    assert len(draw_mix(name, 50, seed=1)) == 50


def test_what_the_mixes_are_like() -> None:
    chat, code = draw_mix("chat", 2000, seed=0), draw_mix("code", 2000, seed=0)
    assert median(r.num_prompt_tokens for r in chat) == pytest.approx(300, rel=0.1)
    assert median(r.num_output_tokens for r in chat) == pytest.approx(150, rel=0.1)
    assert median(r.num_prompt_tokens for r in code) == pytest.approx(1500, rel=0.1)
    assert median(r.num_output_tokens for r in code) == pytest.approx(15, rel=0.1)
    assert max(r.num_prompt_tokens for r in code) == 8000
    classes = [r.slo_class for r in draw_mix("interactive+batch", 2000, seed=0)]
    assert classes.count("batch") / 2000 == pytest.approx(0.3, rel=0.1)
    assert set(classes) == {"interactive", "batch"}


def test_a_mix_arrives_at_once_unless_a_rate_is_given() -> None:
    assert {r.arrival_s for r in WorkloadChoice(source="chat").load()} == {0.0}
    assert len(WorkloadChoice(source="chat").load()) == 100
    at_rate = WorkloadChoice(source="chat", num_requests=1000, rate_per_s=3.0).load()
    assert mean_rate_per_s(at_rate) == pytest.approx(3.0, rel=0.1)


def test_a_file_keeps_its_pattern_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    choice = WorkloadChoice(source=str(path))
    assert [r.arrival_s for r in choice.load()] == [0.0, 0.25, 1.5]
    faster = WorkloadChoice(source=str(path), rate_per_s=4.0).load()
    assert [r.arrival_s for r in faster] == pytest.approx([0.0, 0.25 / 3, 0.5], abs=1e-6)
    random = WorkloadChoice(source=str(path), arrivals="poisson").load()
    assert random[0].arrival_s == 0.0
    assert [r.num_prompt_tokens for r in random] == [2162, 2399, 10]
    assert random != choice.load()


def test_limits(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    assert len(WorkloadChoice(source=str(path), num_requests=2).load()) == 2
    assert len(WorkloadChoice(source=str(path), duration_s=0.25).load()) == 1


def test_what_is_drawn_is_drawn_within_the_context_and_says_so() -> None:
    choice = WorkloadChoice(source="summarize", num_requests=50, max_model_len=2000)
    assert max(r.num_prompt_tokens + r.num_output_tokens for r in choice.load()) == 2000
    too_long = choice.notes().too_long
    assert too_long is not None
    assert (too_long.num_requests, too_long.num_cut > 40) == (50, True)
    with pytest.raises(ConfigError, match="--too-long cut"):
        msgspec.structs.replace(choice, too_long="refuse").load()
    assert WorkloadChoice(source="chat", max_model_len=8192).notes() == NO_NOTES


def test_a_file_beyond_the_context_is_refused_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE + "never,1,2\n")
    choice = WorkloadChoice(
        source=str(path), max_model_len=2200, reading=Reading(skip_bad_rows=True)
    )
    with pytest.raises(
        ConfigError, match=r"1 of 3 requests .* of 2200 tokens, the longest has 2405"
    ):
        choice.load()
    assert len(msgspec.structs.replace(choice, num_requests=1).load()) == 1
    dropping = msgspec.structs.replace(choice, too_long="drop")
    assert [r.num_prompt_tokens for r in dropping.load()] == [2162, 10]
    at_rate = msgspec.structs.replace(dropping, rate_per_s=4.0)
    assert mean_rate_per_s(at_rate.load()) == pytest.approx(4.0)
    assert dropping.notes().lines() == [
        f"1 malformed rows skipped, first {path}:5: could not convert string to float: 'never'",
        "of 3 requests, 1 dropped for a context of 2200 tokens: 52.5% of the prompt tokens are "
        "missing",
    ]


def test_lengths_without_times_arrive_at_random(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(VIDUR)
    assert [r.arrival_s for r in WorkloadChoice(source=str(path)).load()] == [0.0, 0.0]
    at_rate = WorkloadChoice(source=str(path), rate_per_s=2.0).load()
    assert at_rate[1].arrival_s > 0.0
    with pytest.raises(ConfigError, match="no pattern"):
        WorkloadChoice(source=str(path), rate_per_s=2.0, arrivals="trace").load()


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    choice = WorkloadChoice(source=str(path))
    assert len(choice.load()) == 3
    path.write_text("".join(AZURE.splitlines(keepends=True)[:2]))
    os.utime(path, ns=(0, 0))
    assert len(choice.load()) == 1


def test_what_trials_of_a_capacity_draw_from(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    choice = WorkloadChoice(
        source=str(path), start_at_s=0.25, max_model_len=100, too_long="cut"
    ).for_trials()
    lengths = [(r.num_prompt_tokens, r.num_output_tokens) for r in choice.trials().requests]
    assert lengths == [(r.num_prompt_tokens, r.num_output_tokens) for r in choice.load()]
    assert len(WorkloadChoice(source="code").for_trials().trials().requests) > 1000
    otherwises: list[dict[str, Any]] = [{"arrivals": "trace"}, {"time_scale": 2.0}]
    for otherwise in otherwises:
        with pytest.raises(ConfigError, match="Poisson"):
            WorkloadChoice(source=str(path), **otherwise).trials()


def test_parts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    late = WorkloadChoice(source=str(path), start_at_s=0.25, time_scale=2.0)
    assert [r.arrival_s for r in late.load()] == [0.0, 2.5]
    drawn = {
        tuple(r.arrival_s for r in WorkloadChoice(source=str(path), sample=2, seed=seed).load())
        for seed in range(20)
    }
    assert drawn == {(0.0, 0.25), (0.0, 1.5), (0.25, 1.5)}


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"sample": 4}, "a sample of 4 of only 3"),
        ({"rate_per_s": 1.0, "time_scale": 2.0}, "both say"),
        ({"start_at_s": 9.0}, "no requests"),
        ({"source": "chat", "start_at_s": 9.0}, "only a file"),
        ({"source": "chat", "time_scale": 2.0}, "only a file"),
    ],
)
def test_choices_that_contradict(tmp_path: Path, chosen: dict[str, Any], message: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    with pytest.raises(ConfigError, match=message):
        WorkloadChoice(**{"source": str(path), **chosen}).load()


def test_no_such_workload() -> None:
    with pytest.raises(ConfigError, match="no file or mix 'chatt'; mixes are: chat, code"):
        WorkloadChoice(source="chatt").load()
    with pytest.raises(ConfigError, match="no requests"):
        WorkloadChoice(source="chat", duration_s=0.0).load()
