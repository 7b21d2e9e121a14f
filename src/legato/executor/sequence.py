"""The executor's state of a request between steps, and the sampler's view of it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from legato.core.plan import GivenTokens
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.executor.constraint import Constraint
from legato.executor.pooling import Float32s, PooledPrompt

_Int64s = npt.NDArray[np.int64]


class TokenLimits:
    """The tokens that a request may have next, by `allowed_token_ids` and `bad_words_token_ids`.

    Prepared once, so that each step checks only the last token.

    Attributes:
        allowed: int64 [any number]; None if all are allowed.
    """

    def __init__(self, params: SamplingParams) -> None:
        allowed, words = params.allowed_token_ids, params.bad_words_token_ids
        self.allowed = None if allowed is None else np.array(allowed, dtype=np.int64)
        self._alone = np.array([word[0] for word in words if len(word) == 1], dtype=np.int64)
        self._endings: defaultdict[int, list[tuple[_Int64s, int]]] = defaultdict(list)
        for *beginning, last in words:
            if beginning:
                self._endings[beginning[-1]].append((np.array(beginning, dtype=np.int64), last))

    @classmethod
    def of(cls, params: SamplingParams) -> "TokenLimits | None":
        """Return the limits of these parameters; None if they forbid nothing."""
        has_any = params.allowed_token_ids is not None or params.bad_words_token_ids
        return cls(params) if has_any else None

    def forbidden(self, output: _Int64s) -> _Int64s:
        """Return the tokens that are a bad word or would complete one: int64 [any number].

        Args:
            output: int64, all output tokens; prompt tokens never begin a bad word.
        """
        begun = self._endings.get(int(output[-1]), ()) if len(output) else ()
        lasts = [
            last
            for beginning, last in begun
            if np.array_equal(output[-len(beginning) :], beginning)
        ]
        return np.concatenate((self._alone, np.array(lasts, dtype=np.int64)))


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """The sampler's view of a request that gets its next token.

    Attributes:
        params: of the request; `seed` is a number unless the request is greedy.
        eos_token_ids: tokens that end the request, beside `params.stop_token_ids`.
        prompt_token_ids: int64.
        output_token_ids: int64; all tokens sampled so far.
        limits: on the next token; None without any.
        mask: uint32 [words], a bit for each token that the grammar allows next, lowest first; None
            without a grammar.
    """

    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    prompt_token_ids: npt.NDArray[np.int64]
    output_token_ids: npt.NDArray[np.int64]
    limits: TokenLimits | None = None
    mask: npt.NDArray[np.uint32] | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)


class SequenceState:
    """Tokens and blocks of one request.

    Args:
        constraint: to the grammar of its output; None without one.
        head: as of `PooledPrompt`.

    Attributes:
        token_ids: int64 [capacity]; the first `num_tokens` are known, then come guesses of the last
            step, or undefined values.
        may_adjust_logits: whether its settings change its logits, now or later.
        num_prompt_logprobs: prompt tokens with log probabilities already returned; recomputation
            after a preemption must not return them again.
        pooled: the vector of its prompt; None if it samples tokens.
        given: the last tokens that were given; None if there were none.
    """

    def __init__(
        self,
        message: AddRequest,
        constraint: Constraint | None = None,
        head: Float32s | None = None,
    ) -> None:
        prompt = message.prompt_token_ids
        assert message.params.max_tokens is not None
        self.message = message
        self.constraint = constraint
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = len(prompt)
        self.token_ids = np.empty(len(prompt) + message.params.max_tokens, dtype=np.int64)
        self.token_ids[: len(prompt)] = prompt
        self.num_prompt_logprobs = 0
        self.given: GivenTokens | None = None
        pooling = message.pooling
        self.pooled = None if pooling is None else PooledPrompt(pooling, len(prompt), head)
        self.may_adjust_logits = message.params.may_adjust_logits
        self._limits = TokenLimits.of(message.params)
        self._block_ids: Sequence[int] = ()
        self._block_row = np.zeros(0, dtype=np.int32)
        # Key a window group of the cache, value its block ids and the row made of them.
        self._window_rows: dict[int, tuple[Sequence[int], npt.NDArray[np.int32]]] = {}

    def append(self, token_id: int) -> None:
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1

    def guess(self, token_ids: Sequence[int], start: int) -> None:
        """Write guesses at `start`; sampled tokens will overwrite them.

        `start` is after the known tokens and after the tokens that steps in flight will sample.
        """
        self.token_ids[start : start + len(token_ids)] = token_ids

    def sampling_row(self, num_tokens: int) -> SamplingRow:
        """Return its view with `num_tokens` tokens; the last ones may be guesses."""
        masks = None if self.constraint is None else self.constraint.masks
        return SamplingRow(
            params=self.message.params,
            eos_token_ids=self.message.eos_token_ids,
            prompt_token_ids=self.token_ids[: self.num_prompt_tokens],
            output_token_ids=self.token_ids[self.num_prompt_tokens : num_tokens],
            limits=self._limits,
            mask=None if masks is None else masks[num_tokens - self.num_tokens],
        )

    def block_row(self, block_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """Return int32 [blocks]; cached, since a request's blocks change only every few steps."""
        if block_ids is not self._block_ids:
            self._block_ids = block_ids
            self._block_row = np.array(block_ids, dtype=np.int32)
        return self._block_row

    def window_row(self, group: int, block_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """Return the row of a window group's block table, as `block_row` does."""
        found = self._window_rows.get(group)
        if found is None or found[0] is not block_ids:
            found = self._window_rows[group] = (block_ids, np.array(block_ids, dtype=np.int32))
        return found[1]
