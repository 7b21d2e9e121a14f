"""A drafter that is right, right for a while or wrong, as chance has it."""

import random
from collections import Counter
from collections.abc import Callable, Sequence

from legato.core.request import Request
from legato.core.step_record import DrafterName
from legato.speculation.drafter import Draft


class RandomDrafter:
    """Knows what comes, and tells it, or some of it, or something else.

    It checks what a `Drafter` may rely on.

    Args:
        coming: the tokens that a request has next, so many of them.
        vocab_size: wrong ones are drawn from.
        rightness: of each token to be right.

    Attributes:
        num_told: key request id, value its number of tokens at the last call.
    """

    name: DrafterName = "model"

    def __init__(
        self,
        coming: Callable[[Request, int], Sequence[int]],
        seed: int = 0,
        *,
        vocab_size: int,
        rightness: float = 0.8,
    ) -> None:
        self.num_told: Counter[str] = Counter()
        self._coming = coming
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._rightness = rightness

    def advance(self, request: Request) -> None:
        assert request.num_tokens >= self.num_told[request.request_id]
        assert request.num_tokens == len(request.token_ids)
        assert request.finish_reason is None
        self.num_told[request.request_id] = request.num_tokens

    def propose(self, request: Request, most: int) -> Draft | None:
        assert most > 0
        assert self.num_told[request.request_id] == request.num_tokens
        rng = self._random
        count = rng.randint(0, most)
        if not count:
            return None
        token_ids = [
            token_id if rng.random() < self._rightness else rng.randrange(self._vocab_size)
            for token_id in self._coming(request, count)
        ]
        return Draft(self.name, token_ids, [rng.uniform(0.05, 0.99) for _ in token_ids])

    def forget(self, request: Request) -> None:
        self.num_told.pop(request.request_id, None)
