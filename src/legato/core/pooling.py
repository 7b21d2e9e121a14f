"""Pooling: a request whose result is a vector of its prompt, not tokens."""

from typing import Literal

from legato.core.sampling_params import SamplingParams

Pooling = Literal["last", "mean"]
"""What becomes of a prompt's hidden states after the final norm: the last one, or their mean."""

UNSAMPLED = SamplingParams(temperature=0.0, seed=0, max_tokens=1)
"""Sampling settings of a pooled request, which no step reads."""
