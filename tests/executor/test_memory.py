import pytest
import torch

from legato.executor.cache_memory import num_swap_blocks, raising_memory_error


def test_no_memory_on_the_cpu() -> None:
    with pytest.raises(MemoryError, match="allocate"), raising_memory_error():
        torch.empty(2**60, dtype=torch.uint8)


def test_no_memory_on_a_device() -> None:
    with pytest.raises(MemoryError), raising_memory_error():
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shape"), raising_memory_error():
        torch.empty(2) @ torch.empty(3, 3)


@pytest.mark.parametrize(("device", "word"), [("cpu", "makes more"), ("cuda", "experimental")])
def test_swap_space_is_warned_of(device: str, word: str, caplog: pytest.LogCaptureFixture) -> None:
    count = num_swap_blocks(2**20, bytes_per_block=2**18, device=torch.device(device))
    assert count == 4
    assert word in caplog.text
