"""How long the outputs of running requests are going to be, by what others have come to."""

import math
from collections import deque

from sortedcontainers import SortedList

from legato.core.request import Request

_WINDOW = 512
"""Ended requests that are remembered."""

_PRIOR = 256
"""What an output is expected to be of before any has ended: about a chat's mean."""


class OutputLengths:
    """Recent output lengths, and a quantile of them that is believed.

    Args:
        optimism: in [0, 1]. At 0 every request is expected to generate all that it may; else what
            a share `1 - optimism` of the outputs that came as far stayed within, at 1 one token.
    """

    def __init__(self, optimism: float, max_model_len: int) -> None:
        self._optimism = optimism
        self._max_model_len = max_model_len
        self._recent = deque([_PRIOR])
        self._sorted = SortedList(self._recent)

    def observe(self, num_tokens: int) -> None:
        """An output ended with so many tokens."""
        self._recent.append(num_tokens)
        self._sorted.add(num_tokens)
        if len(self._recent) > _WINDOW:
            self._sorted.remove(self._recent.popleft())

    def num_expected_tokens(self, request: Request) -> int:
        """Tokens that it is still expected to generate, at least one.

        An output longer than all that are known is expected to last as long again (Lindy's law).
        """
        num_allowed = self._num_allowed(request)
        if not self._optimism:
            return num_allowed
        return min(self._num_believed(request.num_output_tokens), num_allowed)

    def _num_believed(self, num_generated: int) -> int:
        first_longer = self._sorted.bisect_right(num_generated)
        num_longer = len(self._sorted) - first_longer
        if not num_longer:
            return num_generated
        num_within = math.ceil((1.0 - self._optimism) * num_longer)
        if not num_within:
            return 1
        length: int = self._sorted[first_longer + num_within - 1]
        return length - num_generated

    def _num_allowed(self, request: Request) -> int:
        assert request.params.max_tokens is not None
        num_left = request.params.max_tokens - request.num_output_tokens
        return max(1, min(num_left, self._max_model_len - request.num_tokens))
