"""Mixes and files as a user chooses them."""

from pathlib import Path
from statistics import median

import pytest

from legato.bench.workload.choice import WorkloadChoice
from legato.bench.workload.mixes import MIXES, draw_mix
from legato.bench.workload.requests import mean_rate_per_s
from legato.core.errors import ConfigError
from tests.bench.test_traces import AZURE


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
    cut = WorkloadChoice(source=str(path), max_model_len=100).load()
    assert max(r.num_prompt_tokens + r.num_output_tokens for r in cut) == 100


def test_trials_differ_only_in_their_rate() -> None:
    choice = WorkloadChoice(source="code", num_requests=20)
    slow, fast = choice.at_poisson_rate(1.0), choice.at_poisson_rate(2.0)
    assert [r.num_prompt_tokens for r in slow] == [r.num_prompt_tokens for r in fast]
    assert [r.arrival_s for r in fast] == pytest.approx([r.arrival_s / 2 for r in slow])
    with pytest.raises(ConfigError, match="Poisson"):
        WorkloadChoice(source="code", arrivals="trace").at_poisson_rate(1.0)


def test_no_such_workload() -> None:
    with pytest.raises(ConfigError, match="no file or mix 'chatt'; mixes are: chat, code"):
        WorkloadChoice(source="chatt").load()
    with pytest.raises(ConfigError, match="no requests"):
        WorkloadChoice(source="chat", duration_s=0.0).load()
