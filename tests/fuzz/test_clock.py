"""A small part of what `python -m tests.fuzz --only clock` does for long."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.launch import running_server
from tests.fuzz.clock import has_compiler, shift_clock, shiftable_clock
from tests.profiles import scaled

pytestmark = pytest.mark.skipif(not has_compiler(), reason="no C compiler for the library")


def test_only_the_system_clock_is_shifted(tmp_path: Path) -> None:
    """Else the tests below would show nothing."""
    code = "import time; print(int(time.time()), int(time.monotonic()))"
    with shiftable_clock(tmp_path) as clock:
        first = [
            int(word) for word in subprocess.check_output([sys.executable, "-c", code]).split()
        ]
        clock.shift(-(10**6))
        then = [int(word) for word in subprocess.check_output([sys.executable, "-c", code]).split()]
    assert then[0] < first[0] - 10**6 + 10**4
    assert then[1] >= first[1]


def test_a_server_does_not_depend_on_the_system_clock(tmp_path: Path) -> None:
    with shiftable_clock(tmp_path) as clock, running_server(tmp_path, is_forked=False) as server:
        for seed in range(scaled(3)):
            _, told = shift_clock(clock, server, seed)
            assert told
        assert "Traceback" not in server.log.read_text()
