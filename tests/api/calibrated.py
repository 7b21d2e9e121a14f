"""Measures how long steps of the tests' servers take, and keeps that for all of them.

A server keeps what it measured unless other programs ran beside it. In a test run they always do,
and each server with an SLO would measure for ten seconds.
"""

import argparse
from pathlib import Path

from legato.cli.flags import add_engine_flags, engine_config
from legato.engine.build.builder import load_runtime
from tests.api.launch import FLAGS
from tests.forks.start import run


def calibrate(folder: Path) -> None:
    """Measure in a process of its own, into a folder for `--calibration-dir`."""
    done = run("tests.api.calibrated", *FLAGS, "--calibration-dir", str(folder))
    assert done.returncode == 0, done.stderr


def main() -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    step_times = load_runtime(engine_config(parser.parse_args())).step_times
    steps = step_times.calibration().run(lambda _: None)
    step_times.file.save(step_times.measurements(steps))


if __name__ == "__main__":
    main()
