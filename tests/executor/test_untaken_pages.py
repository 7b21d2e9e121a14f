"""Memory taken before it is used."""

import mmap
import sys

import psutil
import pytest
import torch

from legato.executor import untaken_pages
from legato.executor.untaken_pages import UntakenPages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked for it")

NUM_BYTES = 2**26


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def untouched() -> torch.Tensor:
    """Of new pages; `torch.empty` may be given some that were used before."""
    return torch.frombuffer(mmap.mmap(-1, NUM_BYTES), dtype=torch.uint8)


def test_all_is_taken_and_nothing_written() -> None:
    values = untouched()
    values[12345] = 7
    before = resident_bytes()
    pages = UntakenPages(values)
    assert pages.has_more
    pages.take_slice()
    if not pages.has_more:
        pytest.skip("the kernel is older than 5.14")
    assert resident_bytes() - before < NUM_BYTES / 2
    while pages.has_more:
        pages.take_slice()
    assert resident_bytes() - before > 0.9 * NUM_BYTES
    assert values[12345] == 7


def test_what_others_may_want_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untaken_pages, "free_memory_bytes", lambda: 2 * NUM_BYTES - 2**20)
    values = untouched()
    before = resident_bytes()
    pages = UntakenPages(values)
    pages.take_slice()
    assert not pages.has_more
    assert resident_bytes() - before < NUM_BYTES / 2
