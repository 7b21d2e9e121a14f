"""Contains errors of bookkeeping, so that they end one request or query at most."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TypeVar

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")
_Other = TypeVar("_Other")


def _ignore(_: Exception) -> None:
    """Do nothing."""


class Containment:
    """Logs and counts errors of bookkeeping, so that the engine can go on.

    Attributes:
        num_errors: errors so far.
    """

    def __init__(self) -> None:
        self.num_errors = 0

    def note(self, what: str, error: BaseException) -> None:
        """Log an error with its traceback, and count it."""
        self.num_errors += 1
        logger.error("%s failed", what, exc_info=error)

    def containing(
        self, what: str, on_error: Callable[[Exception], object] = _ignore
    ) -> AbstractContextManager[None, bool]:
        """Catch and note exceptions raised inside.

        Args:
            what: the work done inside, for the log.
            on_error: called after an exception was noted.
        """
        return _Containing(self, what, on_error)

    def value(self, what: str, ask: Callable[[], _Value], otherwise: _Other) -> _Value | _Other:
        """Return what `ask` returns; note what it raises, and return `otherwise`."""
        try:
            return ask()
        except Exception as error:
            self.note(what, error)
            return otherwise


class _Containing:
    """See `Containment.containing`. A generator would take twice as long, in every step."""

    def __init__(
        self, containment: Containment, what: str, on_error: Callable[[Exception], object]
    ) -> None:
        self._containment = containment
        self._what = what
        self._on_error = on_error

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._containment.note(self._what, error)
        try:
            self._on_error(error)
        except Exception as another:
            self._containment.note(f"what follows when {self._what} fails", another)
        return True
