"""Prompts without meaning, of any length."""

import numpy as np

from legato.core.errors import ConfigError

_LOWEST_TOKEN = 1000  # below are special tokens and single bytes


class RandomPrompts:
    """Draws token ids, never the same prompt twice, so that no prefix cache can help.

    Raises:
        ConfigError: the vocabulary is too small to draw from.
    """

    def __init__(self, *, vocab_size: int, seed: int) -> None:
        if vocab_size <= _LOWEST_TOKEN:
            raise ConfigError(f"vocab_size must be above {_LOWEST_TOKEN}, got {vocab_size}")
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)

    def draw(self, num_tokens: int) -> list[int]:
        ids: list[int] = self._rng.integers(
            _LOWEST_TOKEN, self._vocab_size, size=num_tokens
        ).tolist()
        return ids
