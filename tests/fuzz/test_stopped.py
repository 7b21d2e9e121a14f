"""A small part of what `python -m tests.fuzz --only stopped` does for long."""

from pathlib import Path

import pytest

from tests.fuzz.stopped import stop_processes
from tests.profiles import scaled


@pytest.mark.endurance
def test_a_server_outlives_what_is_taken_from_it(tmp_path: Path) -> None:
    """How long others wait is told by the long run: the machine may be busy here."""
    found = stop_processes(range(scaled(2)), 300.0, tmp_path)
    assert [failure for failure in found.failures if "delayed" not in failure] == []
    assert found.told
