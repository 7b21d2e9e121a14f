"""Thinking budgets: counts the sampled tokens of thought, and ends a thought with given tokens.

The end of a thought is a known sequence of tokens, so it is not sampled: it is appended to the
request, and the next step computes it in one chunk. No mask is bent, and a draft or a step in
flight that went on with the thought has its tokens dropped.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from legato.core.outputs import TokenLogprobs
from legato.core.plan import ChunkResult
from legato.core.request import Request
from legato.core.sampling_params import ThinkingLimit

_GRACE, _MOST_GRACE = 20, 64
"""A thought may end at a line break in the last twentieth of its budget, of at most 64 tokens."""


class ThinkingWatch:
    """Follows the thoughts of one output, token by token.

    Attributes:
        num_tokens: tokens of thinking so far, given ones included; at most the budget.
        num_cuts: thoughts that were ended by given tokens.
    """

    def __init__(self, limit: ThinkingLimit) -> None:
        self.num_tokens = self.num_cuts = 0
        self._limit = limit
        self._is_open = limit.is_open
        self._is_calling = False
        self._ends = frozenset(limit.ends)
        self._breaks = frozenset(limit.breaks)
        self._last: tuple[int, ...] = ()  # as many tokens as the longest mark has
        self._most_last = max(map(len, limit.begins), default=1)
        self._most: float = float("inf")
        if limit.budget is not None:
            self._most = max(0, limit.budget - limit.num_said)
        self._grace = 0 if limit.budget is None else min(int(self._most) // _GRACE, _MOST_GRACE)

    def take(self, token_id: int) -> bool:
        """Follow a sampled token; return whether its thought must end after it."""
        if self._is_open and token_id not in self._ends:
            self.num_tokens += 1
            left = self._most - self.num_tokens
            return left <= 0 or (left <= self._grace and token_id in self._breaks)
        self._is_open = False
        self._last = (*self._last, token_id)[-self._most_last :]
        calls = self._limit.calls
        if calls is not None and token_id in calls:
            self._is_calling = token_id == calls[0] and not self._is_calling
        if not self._is_calling and any(
            self._last[-len(begin) :] == begin for begin in self._limit.begins
        ):
            self._is_open, self._last = True, ()
            return self.num_tokens >= self._most
        return False

    def cut(self, num_given: Callable[[Sequence[int]], int]) -> tuple[int, ...]:
        """End the thought; return the tokens that end it.

        Args:
            num_given: gives tokens to the request; returns how many it has taken, the first ones.
        """
        limit, is_first = self._limit, not self.num_cuts
        self.num_cuts += 1
        self._is_open = False
        given = limit.forced if is_first else limit.forced_again
        given = given[: num_given(given)]
        self._last = given[-self._most_last :]  # they may begin the next thought
        if is_first:
            self.num_tokens += min(limit.num_said, len(given))
            self._most += limit.num_said
        return given


@dataclass
class _Followed:
    """Attributes: is_due: whether the tokens that were last taken end with a thought to be cut."""

    watch: ThinkingWatch
    is_due: bool = False


class ThinkingBudgets:
    """Holds requests to their thinking budgets; those without one pass as they are."""

    def __init__(self) -> None:
        self._followed: dict[str, _Followed] = {}  # key request id

    def counted(self, request: Request, result: ChunkResult | None) -> ChunkResult | None:
        """Return the part of a chunk's result that counts: no token after the end of a thought.

        Nothing counts of a chunk that was planned for other tokens.
        """
        if request.num_passed_over:
            return None
        limit = request.params.thinking_limit
        if limit is None or result is None or not result.token_ids:
            return result
        one = self._followed.get(request.request_id)
        if one is None:
            one = self._followed[request.request_id] = _Followed(ThinkingWatch(limit))
        ends: Collection[int] = (*request.message.eos_token_ids, *request.params.stop_token_ids)
        for count, token_id in enumerate(result.token_ids, 1):
            one.is_due = one.watch.take(token_id)
            if one.is_due and count < len(result.token_ids):
                return result.cut(count, is_complete=False)
            if one.is_due or token_id in ends:
                break
        return result

    def ended(
        self, request: Request, count_in_flight: Callable[[str], int]
    ) -> tuple[tuple[int, ...], int, bool]:
        """Give a request the end of its thought, if that is due.

        Args:
            count_in_flight: returns how many chunks of a request are in flight.

        Returns:
            the tokens given, its tokens of thinking so far, and whether its thinking was cut.
        """
        one = self._followed.get(request.request_id)
        if one is None:
            return (), 0, False
        given: tuple[int, ...] = ()
        if one.is_due and request.finish_reason is None:
            num_in_flight = count_in_flight(request.request_id)
            given = one.watch.cut(lambda forced: request.give(forced, num_in_flight))
        one.is_due = False
        return given, one.watch.num_tokens, one.watch.num_cuts > 0

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._followed.pop(request.request_id, None)


def given_logprobs(
    request: Request,
    logprobs: Sequence[TokenLogprobs] | None,
    num_taken: int,
    given: Sequence[int],
) -> tuple[TokenLogprobs, ...] | None:
    """Return log probabilities of the first sampled tokens, and of given ones, which were certain.

    Args:
        logprobs: of sampled tokens; None if the request asks for none.
        num_taken: sampled tokens that count.
    """
    if logprobs is None:
        return None
    params = request.params
    num_top = 1 if params.logprobs or params.logprob_token_ids else 0
    certain = (TokenLogprobs(one, 0.0, 1, ((one, 0.0),)[:num_top]) for one in given)
    return (*logprobs[:num_taken], *certain)
