"""A small part of what `python -m tests.fuzz --only starved` does for long."""

from pathlib import Path

import pytest

from tests.fuzz.starved import memory_group, starve
from tests.profiles import scaled


@pytest.mark.endurance
def test_a_server_with_half_its_memory_serves_or_says_that_it_cannot(tmp_path: Path) -> None:
    with memory_group() as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
    found = starve(range(scaled(2)), 300.0, tmp_path)
    assert found is not None
    assert found.failures == []
    assert found.told
