"""The soak of `benchmarks.soak`, of which the whole takes less than a minute.

Memory is given more room than in the long run, where a warm-up takes longer than all of this.
"""

import subprocess
import sys
from pathlib import Path


def test_a_short_soak(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0.4", "--cases", "6"]
    soak = subprocess.run(
        [*command, "--max-growth", "0.05", "--out", str(tmp_path)], capture_output=True, text=True
    )
    log = (tmp_path / "soak.log").read_text()
    assert soak.returncode == 0, f"{soak.stdout}\n{soak.stderr}\n{log}"
