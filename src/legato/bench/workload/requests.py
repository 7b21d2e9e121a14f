"""What is asked of a server and when: requests by their lengths, and tokens for their prompts."""

import msgspec
import numpy as np

from legato.core.errors import ConfigError

LOWEST_TOKEN = 1000  # below are special tokens and single bytes
_NUM_FRESH = 4


class WorkloadRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request.

    Attributes:
        arrival_s: from the start of the run.
        num_output_tokens: exactly as many are asked for.
        slo_class, priority, tenant: Legato's extensions of the API; sent only where they are set.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    slo_class: str | None = None
    priority: int = 0
    tenant: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("arrival_s", 0.0), ("num_prompt_tokens", 1), ("num_output_tokens", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")


Workload = list[WorkloadRequest]
"""Requests in the order of their arrival."""


def mean_rate_per_s(workload: Workload) -> float:
    """Arrivals a second, between the first and the last; infinite where all come at once."""
    if len(workload) < 2:
        return float("inf")
    span_s = workload[-1].arrival_s - workload[0].arrival_s
    return (len(workload) - 1) / span_s if span_s > 0.0 else float("inf")


def with_poisson_arrivals(workload: Workload, rate_per_s: float, seed: int) -> Workload:
    """The same requests in the same order, arriving at random.

    Args:
        rate_per_s: infinity makes all arrive at once. With one seed, every rate has the same
            pattern, only stretched.
    """
    gaps_s = np.random.default_rng(seed).exponential(size=len(workload)) / rate_per_s
    gaps_s[:1] = 0.0
    return _arriving(workload, np.cumsum(gaps_s))


def rescaled(workload: Workload, rate_per_s: float) -> Workload:
    """The same requests with their arrivals stretched to a mean rate, the first at 0.

    Args:
        rate_per_s: infinity makes all arrive at once.

    Raises:
        ConfigError: they arrive at once, so that there is no pattern to stretch.
    """
    if len(workload) < 2:
        return _arriving(workload, np.zeros(len(workload)))
    stretch = mean_rate_per_s(workload) / rate_per_s
    if not np.isfinite(stretch):
        raise ConfigError("requests that all arrive at once have no pattern to bring to a rate")
    arrivals_s = np.array([request.arrival_s for request in workload])
    return _arriving(workload, (arrivals_s - arrivals_s[0]) * stretch)


def cut_to(workload: Workload, max_model_len: int) -> Workload:
    """The same requests, short enough for a model's context; the prompt gives way first.

    Args:
        max_model_len: longest prompt plus output in tokens, at least 2.
    """
    return [_cut(request, max_model_len) for request in workload]


def within(workload: Workload, duration_s: float) -> Workload:
    """The requests that arrive before `duration_s`."""
    return [request for request in workload if request.arrival_s < duration_s]


def _arriving(workload: Workload, arrivals_s: np.ndarray) -> Workload:
    return [
        msgspec.structs.replace(request, arrival_s=arrival_s)
        for request, arrival_s in zip(workload, arrivals_s.tolist(), strict=True)
    ]


def _cut(request: WorkloadRequest, max_model_len: int) -> WorkloadRequest:
    num_output = min(request.num_output_tokens, max_model_len - 1)
    num_prompt = min(request.num_prompt_tokens, max_model_len - num_output)
    return msgspec.structs.replace(
        request, num_prompt_tokens=num_prompt, num_output_tokens=num_output
    )


class RandomPrompts:
    """Draws token ids, never the same prompt twice, so that no prefix cache can help.

    A server may remember what an earlier run sent with the same seed, so the first tokens of each
    prompt, on which its cached blocks depend, do not come from the seed.

    Raises:
        ConfigError: the vocabulary is too small to draw from.
    """

    def __init__(self, *, vocab_size: int, seed: int) -> None:
        if vocab_size <= LOWEST_TOKEN:
            raise ConfigError(f"vocab_size must be above {LOWEST_TOKEN}, got {vocab_size}")
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)
        self._fresh = np.random.default_rng()

    def draw(self, num_tokens: int) -> list[int]:
        num_fresh = min(num_tokens, _NUM_FRESH)
        return self._draw(self._fresh, num_fresh) + self._draw(self._rng, num_tokens - num_fresh)

    def _draw(self, rng: np.random.Generator, num_tokens: int) -> list[int]:
        ids: list[int] = rng.integers(LOWEST_TOKEN, self._vocab_size, size=num_tokens).tolist()
        return ids
