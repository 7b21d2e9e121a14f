"""Pooling: a request whose result is a vector of its prompt, not tokens."""

from typing import Literal

from legato.core.sampling_params import SamplingParams

Pooling = Literal["last", "mean"]
"""What an embedding is made of: the last hidden state after the final norm, or their mean."""
PromptPooling = Literal["last", "mean", "score"]
"""The same, or the outputs of the checkpoint's classification head on the last hidden state."""

UNSAMPLED = SamplingParams(temperature=0.0, seed=0, max_tokens=1)
"""Sampling settings of a pooled request, which no step reads."""
