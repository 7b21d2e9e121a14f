"""What counts as a shortage of memory, and what is said of it."""

import errno
import os
import resource
from pathlib import Path

import pytest

from legato.core import memory
from legato.core.errors import ConfigError

_ALLOCATOR = "[enforce fail at alloc.cpp:1] err == 0. DefaultCPUAllocator: can't allocate memory"
_NUMPY = "\n\nIMPORTANT: PLEASE READ THIS\n\nOriginal error was: x.so: failed to map segment from "


class OutOfMemoryError(RuntimeError):
    """As PyTorch's, for GPUs."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "(MemoryError)"),
        (MemoryError("Unable to allocate 108. MiB"), "(Unable to allocate 108. MiB)"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory)"),
        (OutOfMemoryError("CUDA out of memory"), "(CUDA out of memory)"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors"), "(CUDA error: out of"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "(Triton Error [CUDA]: out of"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            "CUBLAS_STATUS_ALLOC_FAILED",
        ),
        (RuntimeError(_ALLOCATOR), "(can't allocate memory)"),
        (RuntimeError("can't start new thread"), "(can't start new thread)"),
        (ImportError(f"{_NUMPY}shared object file"), "(Original error was: x.so: failed"),
    ],
)
def test_shortages(error: BaseException, reason: str) -> None:
    assert memory.is_shortage(error)
    described = memory.describe_shortage(error)
    assert reason in described
    assert "--kv-cache-memory" in described
    assert "\n" not in described


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOENT, "No such file"),
        RuntimeError("boom"),
        ImportError("cannot allocate memory in static TLS block"),
        ValueError("Cannot allocate memory"),
    ],
)
def test_other_errors(error: BaseException) -> None:
    assert not memory.is_shortage(error)


def test_the_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit_to(num_bytes: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (num_bytes, resource.RLIM_INFINITY))

    limit_to(resource.RLIM_INFINITY)
    assert memory.address_space_bytes() is None
    memory.check_address_space()
    assert "ulimit" not in memory.advice()
    limit_to(2**31)
    assert "ulimit -v, 2,048 MiB" in memory.advice()
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    memory.check_address_space()
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    with pytest.raises(ConfigError, match=r"limited to 2,048 MiB .* take 2,304 MiB"):
        memory.check_address_space()


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
        ({}, "0::/", None),
    ],
)
def test_the_tightest_control_group_counts(
    tmp_path: Path, files: dict[str, str], own: str, room: int | None
) -> None:
    for name, contents in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(contents)
    assert memory.cgroup_room_bytes(tmp_path, own) == room
