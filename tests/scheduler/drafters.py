"""Drafters that are right, right for a while or wrong, as chance has it."""

import random
from collections import Counter
from collections.abc import Callable, Sequence

from legato.core.request import Request
from legato.core.step_record import DrafterName
from legato.executor.simulated import VirtualClock
from legato.speculation.drafter import Draft, Drafted


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


class RandomDraftModel:
    """Drafts by passes that take time, and must compute a request's tokens before its first draft.

    Args:
        coming: as for `RandomDrafter`.
        clock: advanced by each pass.
        pass_s, row_s: seconds of a pass, and of each row in it.
    """

    name: DrafterName = "model"

    def __init__(
        self,
        coming: Callable[[Request, int], Sequence[int]],
        clock: VirtualClock,
        seed: int = 0,
        *,
        vocab_size: int,
        pass_s: float,
        row_s: float,
    ) -> None:
        self._coming = coming
        self._clock = clock
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._pass_s, self._row_s = pass_s, row_s
        self._num_computed: Counter[str] = Counter()  # key request id

    def advance(self, request: Request) -> None:
        assert request.finish_reason is None

    def skip_step(self) -> None:
        pass

    def outlook(self, request: Request, most: int) -> Sequence[float]:
        assert request.num_tokens == len(request.token_ids)
        chance = self._random.choice([0.3, 0.8, 0.95])
        return [chance] * self._random.randint(0, most)

    def num_missing(self, request: Request) -> int:
        return max(1, request.num_tokens - self._num_computed[request.request_id])

    def pass_s(self, num_rows: int) -> float:
        return self._pass_s + self._row_s * num_rows if num_rows else 0.0

    def catch_up(self, requests: Sequence[Request], within_s: float) -> float:
        num_left = max(0, int((within_s - self._pass_s) / self._row_s))
        num_rows = 0
        for request in requests:
            count = min(num_left - num_rows, self.num_missing(request) - 1)
            self._num_computed[request.request_id] += count
            num_rows += count
        return self._compute(num_rows)

    def draft(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        *,
        token_s: float,  # noqa: ARG002
        within_s: float,
    ) -> Drafted:
        rng, seconds = self._random, 0.0
        drafts: list[Draft | None] = []
        depth = rng.randint(1, max(counts))
        for step in range(depth):
            num_rows = sum(step < count for count in counts)
            if seconds + self.pass_s(num_rows) > within_s:
                break
            seconds += self._compute(num_rows)
        for request, count in zip(requests, counts, strict=True):
            if not seconds or rng.random() < 0.1:
                drafts.append(None)
                continue
            self._num_computed[request.request_id] = request.num_tokens
            right = self._coming(request, min(depth, count))
            token_ids = [
                i if rng.random() < 0.8 else rng.randrange(self._vocab_size) for i in right
            ]
            drafts.append(Draft(self.name, token_ids, [0.8] * len(token_ids)))
        return Drafted(drafts, seconds)

    def forget(self, request: Request) -> None:
        del self._num_computed[request.request_id]

    def _compute(self, num_rows: int) -> float:
        """Pass over some rows; return the seconds that it took."""
        seconds = self.pass_s(num_rows)
        self._clock.advance_to(self._clock() + seconds)
        return seconds
