"""The soak of `benchmarks.soak`, here of less than a minute, or of several.

Memory is given more room than in the long run, where a warm-up takes longer than all of this. Few
may run and wait, so that some are refused on a slow machine, too; and with one thread, because
threads that wait for each other crawl on a busy one.
"""

from pathlib import Path

import pytest

from tests.forks.start import run
from tests.profiles import scaled

_SECONDS = scaled(8)


@pytest.mark.endurance
def test_a_soak(tmp_path: Path) -> None:
    server = "--max-num-seqs 4 --max-waiting 4 --num-threads 1"
    flags = f"--minutes {_SECONDS / 60} --cases 6 --max-growth 0.2 {server}"
    soak = run("benchmarks.soak", *flags.split(), "--out", str(tmp_path))
    log = (tmp_path / "soak.log").read_text()
    assert soak.returncode == 0, f"{soak.stdout}\n{soak.stderr}\n{log}"
