"""Errors of bookkeeping are kept to the request, or the question, that they are about."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


def _ignore(_: Exception) -> None:
    """What failed has no other consequence."""


class Containment:
    """Logs and counts what bookkeeping raises, so that the engine can go on.

    Attributes:
        num_errors: so far.
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
        """Let what is raised inside end there.

        Args:
            what: is done inside, for the log.
            on_error: is called after an error was noted.
        """
        try:
            yield
        except Exception as error:
            self.note(what, error)
            on_error(error)
