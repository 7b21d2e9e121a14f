"""A drafter that knows what comes, so that a test says which of its guesses are right."""

from collections.abc import Callable, Mapping, Sequence

from legato.core.request import Request
from legato.core.step_record import DrafterName
from legato.speculation.drafter import Draft

TokenAt = Callable[[str, int], int]
"""Of a request's id and a position."""


def token_in(rows: Mapping[str, Sequence[int]]) -> TokenAt:
    """Tokens of rows by request id, prompts among them; nothing sensible behind a row's end."""
    return lambda name, position: (*rows[name], *[0] * (position + 1))[position]


class Foretold:
    """A `Drafter`.

    Args:
        is_right: whether the guess at a request's position is; the others are of a token beside it.
        chance: what it says of each guess.
    """

    name: DrafterName = "own"

    def __init__(
        self,
        token_at: TokenAt,
        is_right: Callable[[str, int], bool] = lambda *_: True,
        *,
        chance: float = 0.9,
    ) -> None:
        self._token_at = token_at
        self._is_right = is_right
        self._chance = chance
        self._num_told: dict[str, int] = {}  # key request id

    def advance(self, request: Request) -> None:
        self._num_told[request.request_id] = request.num_tokens

    def propose(self, request: Request, most: int) -> Draft | None:
        name, first = request.request_id, self._num_told[request.request_id]
        assert first == request.num_tokens == len(request.token_ids)
        tokens = [self.guess(name, position) for position in range(first, first + most)]
        return Draft(self.name, tokens, [self._chance] * most)

    def forget(self, request: Request) -> None:
        self._num_told.pop(request.request_id, None)

    def guess(self, name: str, position: int) -> int:
        """Of the request's token there."""
        token_id = self._token_at(name, position)
        return token_id if self._is_right(name, position) else abs(token_id - 1)
