"""A small part of what `python -m tests.fuzz` does for long."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.checkpoints import Seeds, load, memory_limit, try_one
from tests.profiles import scaled

_NUM_CHECKPOINTS = scaled(150)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeds]:
    with memory_limit():
        yield Seeds(tmp_path_factory.mktemp("seeds"))


def test_whole_checkpoints_load(seeds: Seeds) -> None:
    load(seeds.gguf)
    load(seeds.folder)


@pytest.mark.endurance
def test_broken_checkpoints_are_refused_or_load(seeds: Seeds, tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(_NUM_CHECKPOINTS):
        try:
            outcomes += try_one(seeds, random.Random(seed), tmp_path)
        except Exception as error:
            raise AssertionError(f"with seed {seed}") from error
    assert len(outcomes) == 5, "both formats load and are refused at times; damaged weights are"
