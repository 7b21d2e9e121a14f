"""What might come next."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
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

    @property
    def survival(self) -> Sequence[float]:
        """Chances of each to be right, and all before it."""
        return [*accumulate(self.chances, mul)]


class Drafted(NamedTuple):
    """What was drafted, an entry a request, and how long that took."""

    drafts: Sequence[Draft | None]
    seconds: float


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


class CostlyDrafter(Protocol):
    """A drafter whose guesses take time inside the step, as a draft model's do.

    It is told of requests like a `Drafter`. It raises nothing: where it is broken, it has no more
    guesses.
    """

    @property
    def name(self) -> DrafterName: ...

    def advance(self, request: Request) -> None:
        """Take in the tokens that have come since the last time."""
        ...

    def rest(self) -> None:
        """A step goes by without its drafts, which are not worth their time."""
        ...

    def outlook(self, request: Request, most: int) -> Sequence[float]:
        """Chances of the next `most` tokens, or fewer, before it has guessed them.

        Each is of being right where all before it are. There are none where it cannot draft.
        """
        ...

    def num_missing(self, request: Request) -> int:
        """Tokens, at least one, that it is to compute before it has the first guess."""
        ...

    def pass_s(self, num_rows: int) -> float:
        """How long computing so many tokens at once is expected to take; 0 for none."""
        ...

    def catch_up(self, requests: Sequence[Request], within_s: float) -> float:
        """Compute missing tokens, those of the first requests first.

        Returns:
            how long it took, which should be no more than `within_s`.
        """
        ...

    def draft(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        *,
        token_s: float,
        within_s: float,
    ) -> Drafted:
        """Guess what comes next, all requests in one pass a token.

        Args:
            counts: of each request, tokens at most.
            token_s: what a token more in the step is worth: guesses end that cost more.
            within_s: after which no pass is begun that would end later.
        """
        ...

    def forget(self, request: Request) -> None:
        """It has ended."""
        ...
