"""Workloads known only by quantiles, such as "prompt p50=300 p99=4000, output p50=150".

Between two quantiles, and beyond the outermost, the logarithm of a length is linear in the standard
normal variable: two quantiles make a lognormal distribution, and one makes all lengths the same.
"""

import math
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from scipy.special import ndtri

from legato.core.errors import ConfigError
from legato_lab.simulation.workload import Workload, WorkloadRequest

_PART = re.compile(r"\s*(prompt|output)((?:\s+p\d+(?:\.\d+)?=\d+)+)\s*")
_QUANTILE = re.compile(r"p(\d+(?:\.\d+)?)=(\d+)")
_FORM = "prompt p50=TOKENS p99=TOKENS, output p50=TOKENS p99=TOKENS"

Quantiles = list[tuple[float, int]]
"""Percentage and tokens, both ascending."""


def are_quantiles(text: str) -> bool:
    """Whether a text is meant as quantiles, valid or not."""
    return text.lstrip().startswith(("prompt ", "output "))


def draw_quantiles(text: str, num_requests: int, seed: int) -> Workload:
    """Draw requests of such lengths, all arriving at once; one seed always gives the same.

    Raises:
        ConfigError: the text has another form, or its quantiles do not ascend.
    """
    parts = [_PART.fullmatch(part) for part in text.split(",")]
    found = {part[1]: _parse(part[2]) for part in parts if part is not None}
    if None in parts or sorted(found) != ["output", "prompt"] or len(parts) != len(found):
        raise ConfigError(f"{text!r} is not of the form {_FORM!r}")
    rng = np.random.default_rng(seed)
    prompts = _draw(found["prompt"], rng.standard_normal(num_requests))
    outputs = _draw(found["output"], rng.standard_normal(num_requests))
    return [WorkloadRequest(0.0, *lengths) for lengths in zip(prompts, outputs, strict=True)]


def _parse(text: str) -> Quantiles:
    found = [(float(percent), int(tokens)) for percent, tokens in _QUANTILE.findall(text)]
    percents, tokens = zip(*found, strict=True)
    if not _ascend(percents) or any(not 0.0 < percent < 100.0 for percent in percents):
        raise ConfigError(f"percentiles must ascend within (0, 100), got{text}")
    if any(low > high for low, high in pairwise(tokens)) or tokens[0] < 1:
        raise ConfigError(f"tokens must be at least 1 and must not descend, got{text}")
    return found


def _ascend(values: Sequence[float]) -> bool:
    return all(low < high for low, high in pairwise(values))


def _draw(quantiles: Quantiles, normal: np.ndarray) -> list[int]:
    """Draw lengths of at least a token, one for each standard normal number."""
    at = [float(ndtri(percent / 100.0)) for percent, _ in quantiles]
    logs = [math.log(tokens) for _, tokens in quantiles]
    if len(at) > 1:
        ends = (min(normal.min(), at[0]) - 1.0, max(normal.max(), at[-1]) + 1.0)
        logs = [_beyond(at[:2], logs[:2], ends[0]), *logs, _beyond(at[-2:], logs[-2:], ends[1])]
        at = [ends[0], *at, ends[1]]
    lengths = np.exp(np.interp(normal, at, logs))
    return [int(length) for length in np.maximum(1, np.rint(lengths))]


def _beyond(at: list[float], values: list[float], place: float) -> float:
    """Return the value at a place on the line through two points."""
    slope = (values[1] - values[0]) / (at[1] - at[0])
    return values[0] + slope * (place - at[0])
