"""Greedy tokens of every family in float32 are those of transformers, under any schedule."""

import pytest

from tests.families.conftest import Saved
from tests.families.schedules import check_schedules
from tests.families.tiny import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_chunked_mixed_and_with_prefix_hits(name: str, saved: Saved) -> None:
    folder, reference = saved(name)
    check_schedules(reference, folder)
