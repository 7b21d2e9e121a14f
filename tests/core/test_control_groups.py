"""Limits of control groups of both versions, and the cores that a process may use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from legato.core import control_groups
from legato.core.control_groups import (
    cgroup_cores,
    cgroup_limit_bytes,
    cgroup_room_bytes,
    usable_cores,
)


def write(root: Path, files: dict[str, str]) -> None:
    for name, contents in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(contents)


@pytest.mark.parametrize(
    ("files", "own", "room"),
    [
        ({"a/memory.max": "900", "a/memory.current": "200"}, "0::/a/b", 700),
        ({"a/memory.max": "max", "a/memory.current": "200"}, "0::/a", None),
        (
            {
                "a/memory.max": "900",
                "a/memory.current": "200",
                "a/b/memory.max": "400",
                "a/b/memory.current": "500",
            },
            "0::/a/b",
            0,
        ),
        (
            {"memory/c/memory.limit_in_bytes": "900", "memory/c/memory.usage_in_bytes": "100"},
            "5:cpu,memory:/c\n4:pids:/",
            800,
        ),
        (
            {
                "memory.max": "900",
                "memory.current": "800",
                "memory.stat": "anon 100\nfile 700\ninactive_file 600\nactive_file 100\n",
            },
            "0::/",
            700,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "900",
                "memory/memory.usage_in_bytes": "800",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
            },
            "5:memory:/docker/3f1c9d0a77aa",
            600,
        ),
        ({"memory.max": "9", "memory.current": "8", "memory.stat": "inactive_file"}, "0::/", 1),
        ({}, "0::/", None),
    ],
)
def test_the_tightest_control_group_counts(
    tmp_path: Path, files: dict[str, str], own: str, room: int | None
) -> None:
    write(tmp_path, files)
    assert cgroup_room_bytes(tmp_path, own) == room


@pytest.mark.parametrize(
    ("files", "own", "limit"),
    [
        ({"a/memory.max": "900", "memory.max": "800"}, "0::/a/b", 800),
        ({"memory.max": "max"}, "0::/", None),
        ({"memory/memory.limit_in_bytes": "900"}, "3:memory:/c", 900),
    ],
)
def test_the_most_memory_of_all_groups(
    tmp_path: Path, files: dict[str, str], own: str, limit: int | None
) -> None:
    write(tmp_path, files)
    assert cgroup_limit_bytes(tmp_path, own) == limit


@pytest.mark.parametrize(
    ("files", "own", "cores"),
    [
        ({"cpu.max": "400000 100000"}, "0::/", 4.0),
        ({"cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, "0::/a/b", 0.5),
        ({"cpu.max": "250000 100000", "a/cpu.max": "800000 100000"}, "0::/a", 2.5),
        ({"cpu.max": "max 100000"}, "0::/", None),
        ({"cpu.max": "nonsense"}, "0::/", None),
        ({"cpu.max": "1 0"}, "0::/", None),
        (
            {"cpu/d/cpu.cfs_quota_us": "400000", "cpu/d/cpu.cfs_period_us": "100000"},
            "2:cpuacct,cpu:/d\n4:memory:/",
            4.0,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "2:cpu:/", None),
        ({}, "2:cpu:/\n0::/", None),
    ],
)
def test_the_smallest_quota_counts(
    tmp_path: Path, files: dict[str, str], own: str, cores: float | None
) -> None:
    write(tmp_path, files)
    assert cgroup_cores(tmp_path, own) == cores


@pytest.mark.parametrize(("quota", "least"), [(None, 64), (4.0, 4), (4.9, 4), (0.5, 1), (99.0, 64)])
def test_a_quota_below_the_affinity(
    quota: float | None, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(control_groups, "cgroup_cores", lambda: quota)
    assert usable_cores() == least


@pytest.mark.parametrize(
    ("quota", "num_threads", "advice"),
    [
        (None, 4, None),
        (4.0, 4, "--num-threads 3"),
        (4.0, 3, None),
        (4.5, 4, "--num-threads 3"),
        (1.5, 1, "reserve whole cores"),
        (64.0, 64, None),
        (99.0, 64, None),
    ],
)
def test_a_quota_that_stops_threads_is_named(
    quota: float | None, num_threads: int, advice: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(control_groups, "cgroup_cores", lambda: quota)
    told = control_groups.throttling(num_threads)
    assert (told is None) == (advice is None)
    if told is not None and advice is not None:
        assert told.startswith(f"a quota of {quota:g} cores (cpu.max) can break promises: with ")
        assert advice in told
        assert ("--num-threads" in told) == (advice.startswith("--"))


def test_the_affinity_counts() -> None:
    """As the kernel reports it, of a process that may use one core alone."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from legato.core.control_groups import usable_cores; print(usable_cores())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "1\n"
