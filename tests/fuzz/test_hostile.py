"""A small part of what `python -m tests.fuzz --only files` does for long."""

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.fuzz.checkpoints import memory_limit
from tests.fuzz.hostile import BREAKERS, ROOM_BYTES, HostileSeeds, load, try_hostile
from tests.profiles import scaled

_NUM_FILES = scaled(50)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> HostileSeeds:
    return HostileSeeds(tmp_path_factory.mktemp("seeds"))


def test_whole_files_load(seeds: HostileSeeds) -> None:
    for path in (seeds.gguf, seeds.folder, *seeds.quantized):
        with memory_limit(ROOM_BYTES):
            load(path)


@pytest.mark.endurance
def test_hostile_files_take_little_memory(seeds: HostileSeeds, tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(_NUM_FILES):
        try:
            with memory_limit(ROOM_BYTES):
                outcomes += try_hostile(seeds, random.Random(seed), tmp_path)
        except Exception as error:
            raise AssertionError(f"with seed {seed}") from error
    assert {outcome.split()[0] for outcome in outcomes} == {own.__name__ for own in BREAKERS}
