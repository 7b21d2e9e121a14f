"""The tokens a request may have next, by `allowed_token_ids` and `bad_words_token_ids`."""

from collections import defaultdict

import numpy as np
import numpy.typing as npt

from legato.core.sampling_params import SamplingParams

_Int64s = npt.NDArray[np.int64]


class TokenLimits:
    """Limits of one request, prepared once, so that each step checks only the last token.

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
