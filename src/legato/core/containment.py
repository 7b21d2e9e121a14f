"""Contains errors of bookkeeping, so that they end one request or query at most."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


def _ignore(_: Exception) -> None:
    """Do nothing."""


class Containment:
    """Logs and counts errors of bookkeeping, so that the engine can go on.

    Attributes:
        num_errors: errors so far.
    """

    def __init__(self) -> None:
        self.num_errors = 0

    def note(self, what: str, error: Exception) -> None:
        """Log an error with its traceback, and count it."""
        self.num_errors += 1
        logger.error("%s failed", what, exc_info=error)

    @contextmanager
    def containing(
        self, what: str, on_error: Callable[[Exception], object] = _ignore
    ) -> Iterator[None]:
        """Catch and note exceptions raised inside.

        Args:
            what: the work done inside, for the log.
            on_error: called after an exception was noted.
        """
        try:
            yield
        except Exception as error:
            self.note(what, error)
            on_error(error)
