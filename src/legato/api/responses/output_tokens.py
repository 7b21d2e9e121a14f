"""Finds the tokens of each part of a message by their places in the completion's text."""

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable

from legato.core.outputs import TokenLogprobs
from legato.core.sampling_params import SamplingParams
from legato.core.vocabulary import Vocabulary
from legato.language.completion import CompletionDelta
from legato.language.message.message import TextSpan
from legato.language.output_text import Detokenizer


class OutputTokens:
    """The tokens of one completion.

    A part of the message may come later than its tokens: space and possible marks wait for the text
    after them.
    """

    def __init__(self, vocabulary: Vocabulary, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(
            vocabulary,
            skip_special_tokens=params.skip_special_tokens,
            kept=params.kept_special_tokens,
        )
        self._num_chars = 0
        self._ends = array("L")  # of all tokens, in characters
        self._scored: deque[tuple[int, int, TokenLogprobs]] = deque()  # start, end, entry

    def add(self, delta: CompletionDelta) -> None:
        """Add a delta's tokens."""
        entries = delta.logprobs or ()
        for i, token_id in enumerate(delta.token_ids):
            start = self._num_chars
            self._num_chars += len(self._detokenizer.push(token_id))
            self._ends.append(self._num_chars)
            if i < len(entries):
                self._scored.append((start, self._num_chars, entries[i]))

    def scored_in(self, span: TextSpan) -> list[TokenLogprobs]:
        """Return the entries of a span's tokens, once; spans must come in order.

        A token without text of its own, the first bytes of a character, goes with the next one.
        """
        found = []
        while self._scored and self._scored[0][0] < span.end:
            start, end, entry = self._scored.popleft()
            if end > span.start or start == span.start:
                found.append(entry)
        return found

    def num_in(self, places: Iterable[tuple[int, int | None]]) -> int:
        """Return how many tokens stand in parts of the text, wholly or partly.

        Args:
            places: where each begins and ends; None for the end of one that is open.
        """
        return sum(self._num_between(start, end) for start, end in places)

    def _num_between(self, start: int, end: int | None) -> int:
        first = bisect_right(self._ends, start) if start else 0
        last = len(self._ends) if end is None else bisect_left(self._ends, end) + 1
        return max(0, min(last, len(self._ends)) - first)
