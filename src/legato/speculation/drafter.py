"""Drafts of a request's next tokens, and the drafters that make them."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple, Protocol

from legato.core.request import Request
from legato.core.step_record import DrafterName


class Draft(NamedTuple):
    """Tokens that may come next in a request.

    Attributes:
        chances: chance of each token to be right if all before it are.
    """

    drafter: DrafterName
    token_ids: Sequence[int]
    chances: Sequence[float]

    @property
    def survival(self) -> Sequence[float]:
        """Chance of each token that it and all before it are right."""
        return [*accumulate(self.chances, mul)]


class Drafted(NamedTuple):
    """Drafts, one entry for each request, and the seconds that they took."""

    drafts: Sequence[Draft | None]
    seconds: float


class Drafter(Protocol):
    """Proposes a request's next tokens, and learns from the tokens that come.

    It follows a request once that is a stream, until `forget`. The request's tokens only grow.
    """

    @property
    def name(self) -> DrafterName: ...

    def advance(self, request: Request) -> None:
        """Learn the tokens that have come since the last call."""
        ...

    def propose(self, request: Request, most: int) -> Draft | None:
        """Return up to `most` tokens after the last known one; None if no token is likely.

        If tokens are in flight, the first tokens of the draft are guesses of them.
        """
        ...

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        ...


class CostlyDrafter(Protocol):
    """A drafter whose drafts take time of the step, such as a draft model.

    It follows requests like a `Drafter`. It raises nothing: once broken, it makes no more drafts.
    """

    @property
    def name(self) -> DrafterName: ...

    def advance(self, request: Request) -> None:
        """Learn the tokens that have come since the last call."""
        ...

    def skip_step(self) -> None:
        """Record a step without its drafts, which are not worth their time."""
        ...

    def outlook(self, request: Request, most: int) -> Sequence[float]:
        """Return the chances of the next `most` tokens, or fewer, before it drafts them.

        Each is the chance to be right if all before it are. The result is empty if it cannot draft.
        """
        ...

    def num_missing(self, request: Request) -> int:
        """Return the tokens, at least one, that it must compute before its first draft."""
        ...

    def pass_s(self, num_rows: int) -> float:
        """Return the expected seconds of a pass over `num_rows` tokens; 0 for none."""
        ...

    def catch_up(self, requests: Sequence[Request], within_s: float) -> float:
        """Compute missing tokens, those of the first requests first.

        Returns:
            the seconds that it took, which should be no more than `within_s`.
        """
        ...

    def draft(
        self, requests: Sequence[Request], counts: Sequence[int], *, token_s: float, within_s: float
    ) -> Drafted:
        """Draft the next tokens, all requests in one pass per token.

        Args:
            counts: most tokens of each request.
            token_s: worth of one more token in the step, in seconds: drafts that cost more end.
            within_s: no pass is begun that would end later than this.
        """
        ...

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        ...
