"""What might come next."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from legato.core.request import Request
from legato.core.step_record import DrafterName


class Draft(NamedTuple):
    """Tokens that may come next in a request.

    Attributes:
        chances: of each to be right where all before it are.
    """

    drafter: DrafterName
    token_ids: Sequence[int]
    chances: Sequence[float]


class Drafter(Protocol):
    """Proposes what comes after a request's tokens, and learns from what does come.

    A request is told of once it is a stream, and until it is forgotten. Its tokens only grow.
    """

    @property
    def name(self) -> DrafterName: ...

    def advance(self, request: Request) -> None:
        """Take in the tokens that have come since the last time."""
        ...

    def propose(self, request: Request, most: int) -> Draft | None:
        """Up to `most` tokens behind the last known one; None where nothing is likely.

        Where tokens are in flight, the first of these are guesses of them.
        """
        ...

    def forget(self, request: Request) -> None:
        """It has ended."""
        ...
