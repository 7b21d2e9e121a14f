import pytest
import torch

from legato.executor.memory import raising_memory_error


def test_no_memory_on_the_cpu() -> None:
    with pytest.raises(MemoryError, match="allocate"), raising_memory_error():
        torch.empty(2**60, dtype=torch.uint8)


def test_no_memory_on_a_device() -> None:
    with pytest.raises(MemoryError), raising_memory_error():
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shape"), raising_memory_error():
        torch.empty(2) @ torch.empty(3, 3)
