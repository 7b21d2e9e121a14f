"""Limits of this process's control groups, of either version. Torch-free.

In a container, the machine's memory and cores are the host's; the groups say what the container
may take of them.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_LEAST_QUOTA = 2
"""The smallest quota, in cores, that leaves a core beside a thread."""


class _MemoryFiles(NamedTuple):
    limit: str
    usage: str
    cached: str
    """A line of memory.stat: pages of files that the system drops when it needs memory."""


_MEMORY_1 = _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_MEMORY_2 = _MemoryFiles("memory.max", "memory.current", "inactive_file")


def cgroup_limit_bytes(root: Path = _ROOT, own: str | None = None) -> int | None:
    """Return the most memory that the groups allow; None without a limit.

    Args:
        own: contents of /proc/self/cgroup, of either version.
    """
    groups = _groups("memory", root, own)
    limits = (_number(group / _memory_files(is_second).limit) for group, is_second in groups)
    return min((limit for limit in limits if limit is not None), default=None)


def cgroup_room_bytes(root: Path = _ROOT, own: str | None = None) -> int | None:
    """Return the memory that the groups still allow; None without a limit.

    Args:
        own: as of `cgroup_limit_bytes`.
    """
    groups = _groups("memory", root, own)
    rooms = (_room(group, _memory_files(is_second)) for group, is_second in groups)
    return min((room for room in rooms if room is not None), default=None)


def cgroup_cores(root: Path = _ROOT, own: str | None = None) -> float | None:
    """Return the processor time that the groups allow, in cores; None without a limit.

    Args:
        own: as of `cgroup_limit_bytes`.
    """
    groups = _groups("cpu", root, own)
    quotas = (_quota(group, is_second) for group, is_second in groups)
    return min((quota for quota in quotas if quota is not None), default=None)


def throttling(num_threads: int) -> str | None:
    """Say how a quota can stop the threads of an engine, and what to set; None if it cannot.

    Threads cannot use more than a quota of as many cores as they have, as where a container has
    cores of its own. One core is for the server and its readers.
    """
    quota = cgroup_cores()
    if quota is None or quota >= _affine_cores() or num_threads + 1 <= quota:
        return None
    advice = "reserve whole cores (a cpuset, or the static CPU manager of Kubernetes)"
    if quota >= _LEAST_QUOTA:
        advice += f", or set --num-threads {int(quota) - 1}"
    return (
        f"a quota of {quota:g} cores (cpu.max) can break promises: with {num_threads} threads it "
        "may be used up before the end of its period, 100 ms by default, and the kernel then stops "
        f"all threads until that end; {advice}"
    )


def usable_cores() -> int:
    """Return the cores that this process may keep busy: by its affinity and by its groups.

    More threads than that wait for each other: a product of one row takes nine times as long with
    64 threads on one core.
    """
    cores, quota = _affine_cores(), cgroup_cores()
    return cores if quota is None else max(1, min(cores, int(quota)))


def _affine_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _groups(controller: str, root: Path, own: str | None) -> Iterator[tuple[Path, bool]]:
    """Yield this process's groups from the inner one out, and whether they are of version 2."""
    try:
        lines = (_OWN.read_text() if own is None else own).splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(top):
                yield group, not controllers


def _memory_files(is_second: bool) -> _MemoryFiles:
    return _MEMORY_2 if is_second else _MEMORY_1


def _room(group: Path, files: _MemoryFiles) -> int | None:
    limit, usage = _number(group / files.limit), _number(group / files.usage)
    if limit is None or usage is None:
        return None
    return max(0, limit - usage + min(usage, _cached_bytes(group, files.cached)))


def _cached_bytes(group: Path, name: str) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
    except (OSError, ValueError, IndexError):
        return 0


def _quota(group: Path, is_second: bool) -> float | None:
    if is_second:
        try:
            quota, period = (group / "cpu.max").read_text().split()
            return int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):  # it is not visible, or "max"
            return None
    quota_us, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # the group is not visible, or its limit is "max"
        return None
