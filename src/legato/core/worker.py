"""Threads for submitted work, beside threads that must not wait."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from legato.core.niceness import add_niceness

_Params = ParamSpec("_Params")
_Value = TypeVar("_Value")


class Worker:
    """Threads that start with their first work.

    Args:
        num_threads: most works done at the same time.
        stack_bytes: size of a thread's stack; deeper recursion ends the process.
        low_by: niceness added to that of the thread that starts them, as by `add_niceness`.
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
        if self._thread is None:
            self._thread = ThreadPoolExecutor(self._num_threads, self._name, self._begin_thread)
        usual = threading.stack_size(self._stack_bytes)
        try:
            return self._thread.submit(work, *args, **options)
        finally:
            threading.stack_size(usual)

    def _begin_thread(self) -> None:
        if self._low_by:
            add_niceness(self._low_by)
        if self._begin is not None:
            self._begin()
