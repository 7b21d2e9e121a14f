"""Prompts whose undisturbed greedy outputs are known."""

import math
from collections.abc import Sequence

import httpx
import msgspec
import numpy as np

from legato_lab.simulation.workload import RandomPrompts

_VOCAB_SIZE = 49_152  # of the default model
_PROMPT_TOKENS = (8, 300)
_OUTPUT_TOKENS = (8, 40)
_NEAR_TIE = 1e-3
"""Where the two best tokens are closer than this, rounding may pick either: matrix products of
other shapes round differently."""


class Case(msgspec.Struct, frozen=True):
    """A prompt, and what comes of it when it has the server for itself.

    Attributes:
        starts: of each output token in `text`.
        gaps: between the log probabilities of the best two tokens, at each output token.
    """

    prompt: list[int]
    num_tokens: int
    text: str
    starts: list[int]
    gaps: list[float]

    @property
    def request(self) -> dict[str, object]:
        return _request(self.prompt, self.num_tokens)

    def is_near_tie(self, text: str) -> bool:
        """Whether another output is one only because the best two tokens were as good as even."""
        pairs = zip(text, self.text, strict=False)
        shared = min(len(text), len(self.text))
        differs_at = next((i for i, (got, expected) in enumerate(pairs) if got != expected), shared)
        # A token that is part of a character shows in the text later: any up to there may be it.
        return any(
            gap < _NEAR_TIE
            for start, gap in zip(self.starts, self.gaps, strict=True)
            if start <= differs_at
        )


def undisturbed_cases(http: httpx.Client, num_cases: int, seed: int) -> list[Case]:
    """Draw prompts and have them completed, one at a time."""
    rng = np.random.default_rng(seed)
    prompts = RandomPrompts(vocab_size=_VOCAB_SIZE, seed=seed)
    return [
        _complete(http, prompts.draw(_between(rng, _PROMPT_TOKENS)), _between(rng, _OUTPUT_TOKENS))
        for _ in range(num_cases)
    ]


def _complete(http: httpx.Client, prompt: list[int], num_tokens: int) -> Case:
    response = http.post("/v1/completions", json={**_request(prompt, num_tokens), "logprobs": 2})
    response.raise_for_status()
    [choice] = response.json()["choices"]
    logprobs = choice["logprobs"]
    gaps = [_gap(list(top.values())) for top in logprobs["top_logprobs"]]
    return Case(prompt, num_tokens, choice["text"], logprobs["text_offset"], gaps)


def _request(prompt: list[int], num_tokens: int) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}


def _between(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
    return int(rng.integers(*bounds, endpoint=True))


def _gap(logprobs: Sequence[float]) -> float:
    best = sorted(logprobs, reverse=True)
    return best[0] - best[1] if len(best) > 1 else math.inf
