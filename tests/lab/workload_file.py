"""Workloads as files."""

from pathlib import Path

import msgspec

from legato_lab.simulation.workload import Workload


def write_workload(path: Path, workload: Workload) -> None:
    """Write Legato's own format."""
    path.write_bytes(msgspec.json.Encoder().encode_lines(workload))
