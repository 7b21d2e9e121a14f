"""Prompts without meaning, of any length."""

import numpy as np

from legato.core.errors import ConfigError

_LOWEST_TOKEN = 1000  # below are special tokens and single bytes
_NUM_FRESH = 4


class RandomPrompts:
    """Draws token ids, never the same prompt twice, so that no prefix cache can help.

    A server may remember what an earlier run sent with the same seed, so the first tokens of each
    prompt, on which its cached blocks depend, do not come from the seed.

    Raises:
        ConfigError: the vocabulary is too small to draw from.
    """

    def __init__(self, *, vocab_size: int, seed: int) -> None:
        if vocab_size <= _LOWEST_TOKEN:
            raise ConfigError(f"vocab_size must be above {_LOWEST_TOKEN}, got {vocab_size}")
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)
        self._fresh = np.random.default_rng()

    def draw(self, num_tokens: int) -> list[int]:
        num_fresh = min(num_tokens, _NUM_FRESH)
        return self._draw(self._fresh, num_fresh) + self._draw(self._rng, num_tokens - num_fresh)

    def _draw(self, rng: np.random.Generator, num_tokens: int) -> list[int]:
        ids: list[int] = rng.integers(_LOWEST_TOKEN, self._vocab_size, size=num_tokens).tolist()
        return ids
