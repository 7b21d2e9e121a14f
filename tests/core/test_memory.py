"""What counts as a shortage of memory, and what is said of it."""

import errno
import os
import resource

import psutil
import pytest

from legato.core import memory_limits
from legato.core.cache_config import CacheConfig
from legato.core.errors import ConfigError
from legato.executor.cache_memory import cpu_cache_bytes

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
    assert memory_limits.is_shortage(error)
    described = memory_limits.describe_shortage(error)
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
    assert not memory_limits.is_shortage(error)


def test_the_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit_to(num_bytes: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (num_bytes, resource.RLIM_INFINITY))

    limit_to(resource.RLIM_INFINITY)
    assert memory_limits.address_space_bytes() is None
    memory_limits.check_address_space()
    assert "ulimit" not in memory_limits.advice()
    limit_to(2**31)
    assert "ulimit -v, 2,048 MiB" in memory_limits.advice()
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    memory_limits.check_address_space()
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    with pytest.raises(ConfigError, match=r"limited to 2,048 MiB .* take 2,304 MiB"):
        memory_limits.check_address_space()


def test_memory_beyond_any_limit_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = psutil.Process().memory_info().vms
    for limit, most in ((mapped + 2**24, 2**24), (2**20, 0)):
        monkeypatch.setattr(memory_limits, "address_space_bytes", lambda limit=limit: limit)
        assert 0 <= memory_limits.free_memory_bytes() <= most
        assert memory_limits.memory_bytes() <= limit
    monkeypatch.undo()
    monkeypatch.setattr(memory_limits, "cgroup_room_bytes", lambda: 7 * 2**20)
    monkeypatch.setattr(memory_limits, "cgroup_limit_bytes", lambda: 8 * 2**20)
    assert memory_limits.free_memory_bytes() == 7 * 2**20
    assert memory_limits.memory_bytes() == 8 * 2**20
    assert cpu_cache_bytes(CacheConfig()) == 7 * 2**18
    assert cpu_cache_bytes(CacheConfig(gpu_memory_utilization=0.5)) == 7 * 2**19


def test_a_size_beyond_the_machine_is_refused_by_name() -> None:
    memory_limits.check_size("--swap-space", 2**30, 2**30)
    with pytest.raises(ConfigError, match=r"--swap-space is 1.00 GiB, but .* at most 0.50 GiB"):
        memory_limits.check_size("--swap-space", 2**30, 2**29)
