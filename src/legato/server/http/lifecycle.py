"""Whether the server takes new work, and how much is still under way."""

from collections.abc import Iterator
from contextlib import contextmanager


class Lifecycle:
    """Serving, then draining, then drained.

    Attributes:
        is_draining: new work is refused while what runs may finish.
        num_in_flight: requests being answered.
    """

    def __init__(self) -> None:
        self.is_draining = False
        self.num_in_flight = 0

    @property
    def is_drained(self) -> bool:
        return self.is_draining and self.num_in_flight == 0

    def drain(self) -> None:
        self.is_draining = True

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a request for as long as it is being answered."""
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1
