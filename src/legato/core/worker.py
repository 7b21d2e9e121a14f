"""Threads for submitted work, beside threads that must not wait."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_Params = ParamSpec("_Params")
_Value = TypeVar("_Value")

_starting = threading.Lock()
"""Held while the stack size of new threads, which is the whole process's, is a worker's."""


class Worker:
    """Threads that start with their first work.

    Args:
        num_threads: most works done at the same time.
        stack_bytes: size of a thread's stack; deeper recursion ends the process.
        low_by: how much nicer the threads are than the thread that starts them; on Linux only.
        begin: called first on each thread.
    """

    def __init__(
        self,
        name: str,
        *,
        num_threads: int = 1,
        stack_bytes: int,
        low_by: int = 0,
        begin: Callable[[], object] | None = None,
    ) -> None:
        self._name = name
        self._num_threads = num_threads
        self._stack_bytes = stack_bytes
        self._low_by = low_by
        self._begin = begin
        self._thread: ThreadPoolExecutor | None = None

    def submit(
        self, work: Callable[_Params, _Value], *args: _Params.args, **options: _Params.kwargs
    ) -> Future[_Value]:
        """Queue the work for the next free thread."""
        with _starting:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(self._num_threads, self._name, self._begin_thread)
            usual = threading.stack_size(self._stack_bytes)
            try:
                return self._thread.submit(work, *args, **options)
            finally:
                threading.stack_size(usual)

    def _begin_thread(self) -> None:
        if self._low_by and sys.platform == "linux":
            thread = threading.get_native_id()
            nice = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, nice + self._low_by)
        if self._begin is not None:
            self._begin()
