"""Workers start their threads with stacks of their own."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from legato.core.worker import Worker

SIZES = (4 * 2**20, 32 * 2**20)


def test_workers_that_start_together_get_their_own_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of new stacks belongs to the process; deep recursion on a small one ends it."""
    seen: dict[str | None, int] = {}  # key a worker's name
    submit = ThreadPoolExecutor.submit
    both = threading.Barrier(2)

    def held(self: ThreadPoolExecutor, *args: Any) -> "Future[Any]":
        try:
            both.wait(0.1)  # in vain, if only one worker starts a thread
        except threading.BrokenBarrierError:
            both.reset()
        seen[self._thread_name_prefix] = threading.stack_size()
        return submit(self, *args)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", held)
    usual = threading.stack_size()
    workers = {f"{size}": Worker(f"{size}", stack_bytes=size) for size in SIZES}
    threads = [threading.Thread(target=one.submit, args=(int,)) for one in workers.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == {name: int(name) for name in workers}
    assert threading.stack_size() == usual
