"""Measures how long steps of the tests' servers take, and keeps that for all of them.

A server keeps what it measured unless other programs ran beside it. In a test run they always do,
and each server with an SLO would measure for ten seconds.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from legato.cli.flags import add_engine_flags, engine_config
from legato.engine.startup.build import load_parts
from legato.engine.startup.step_times import calibration_file, measurements, new_calibration
from tests.server.launch import FLAGS


def calibrate(folder: Path) -> None:
    """Measure in a process of its own, into a folder for `--calibration-dir`."""
    command = [sys.executable, "-m", "tests.server.calibrated", *FLAGS]
    subprocess.run([*command, "--calibration-dir", str(folder)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    parts = load_parts(engine_config(parser.parse_args()))
    steps = new_calibration(parts).run(lambda _: None)
    calibration_file(parts).save(measurements(parts, steps))


if __name__ == "__main__":
    main()
