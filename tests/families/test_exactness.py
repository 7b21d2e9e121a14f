"""Greedy tokens of every family in float32 are those of transformers, whatever the schedule."""

from pathlib import Path

import pytest

from tests.families.schedules import check_schedules
from tests.families.tiny import MODELS, random_model


@pytest.mark.parametrize("name", MODELS)
def test_chunked_mixed_and_with_prefix_hits(name: str, tmp_path: Path) -> None:
    check_schedules(random_model(MODELS[name]), tmp_path)
