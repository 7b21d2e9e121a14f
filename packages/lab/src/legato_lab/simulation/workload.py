"""Workloads: requests by their arrivals and lengths, and tokens for their prompts."""

import secrets
from collections.abc import Sequence

import msgspec
import numpy as np

from legato.core.errors import ConfigError

HASH_BLOCK = 512
"""Tokens that an id of `WorkloadRequest.hash_ids` stands for."""

LOWEST_TOKEN = 1000  # below are special tokens and single bytes
_NUM_FRESH = 4


class WorkloadRequest(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False
):
    """One request.

    Attributes:
        arrival_s: from the start of the run.
        num_output_tokens: exactly as many are asked for.
        slo_class, priority, tenant: Legato's extensions of the API; sent only if set.
        hash_ids: the blocks of `HASH_BLOCK` tokens at the prompt's start; it may end within the
            last. Equal ids are equal tokens. The rest is this prompt's own.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    slo_class: str | None = None
    priority: int = 0
    tenant: str | None = None
    hash_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # One check at a time, for speed: a file may have a million requests.
        if self.arrival_s < 0.0:
            raise ConfigError(f"arrival_s must be at least 0, got {self.arrival_s}")
        if self.num_prompt_tokens < 1:
            raise ConfigError(f"num_prompt_tokens must be at least 1, got {self.num_prompt_tokens}")
        if self.num_output_tokens < 1:
            raise ConfigError(f"num_output_tokens must be at least 1, got {self.num_output_tokens}")
        if self.hash_ids:
            self._check_hash_ids()

    def _check_hash_ids(self) -> None:
        if min(self.hash_ids) < 0:
            raise ConfigError(f"hash_ids must be at least 0, got {min(self.hash_ids)}")
        most = num_hash_blocks(self.num_prompt_tokens)
        if len(self.hash_ids) > most:
            raise ConfigError(
                f"{len(self.hash_ids)} hash_ids, but {self.num_prompt_tokens} tokens are {most} "
                f"blocks of {HASH_BLOCK}"
            )


Workload = list[WorkloadRequest]
"""Requests in the order of their arrival."""


def num_hash_blocks(num_tokens: int) -> int:
    """Return the number of blocks of a prompt; the last block may not be full."""
    return -(-num_tokens // HASH_BLOCK)


def mean_rate_per_s(workload: Workload) -> float:
    """Return arrivals a second, from the first to the last; infinite if all come at once."""
    if len(workload) < 2:
        return float("inf")
    span_s = workload[-1].arrival_s - workload[0].arrival_s
    return (len(workload) - 1) / span_s if span_s > 0.0 else float("inf")


def with_poisson_arrivals(workload: Workload, rate_per_s: float, seed: int) -> Workload:
    """Give the requests random arrivals, in the same order.

    Args:
        rate_per_s: infinity makes all arrive at once. With one seed, every rate has the same
            pattern, only stretched.
    """
    gaps_s = np.random.default_rng(seed).exponential(size=len(workload)) / rate_per_s
    gaps_s[:1] = 0.0
    return _arriving(workload, np.cumsum(gaps_s))


def rescaled(workload: Workload, rate_per_s: float) -> Workload:
    """Stretch the arrivals to a mean rate, the first at 0.

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


def stretched(workload: Workload, factor: float) -> Workload:
    """Multiply the arrival times by a factor."""
    return _arriving(workload, factor * np.array([request.arrival_s for request in workload]))


def from_time(workload: Workload, start_s: float) -> Workload:
    """Return the requests that arrive from `start_s` on, which becomes 0."""
    later = [request for request in workload if request.arrival_s >= start_s]
    return _arriving(later, np.array([request.arrival_s for request in later]) - start_s)


def cut_to(workload: Workload, max_model_len: int) -> Workload:
    """Shorten requests to a model's context, prompts first.

    Args:
        max_model_len: longest prompt plus output in tokens, at least 2.
    """
    return [_cut(request, max_model_len) for request in workload]


def within(workload: Workload, duration_s: float) -> Workload:
    """Return the requests that arrive before `duration_s`."""
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
        request,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        hash_ids=request.hash_ids[: num_hash_blocks(num_prompt)],
    )


class RandomPrompts:
    """Draws prompts of random tokens, which share only what their requests say.

    A server may have cached an earlier run with the same seed. So the first tokens of each prompt,
    or its shared blocks, which cached blocks depend on, do not come from the seed.

    Raises:
        ConfigError: the vocabulary is too small to draw from.
    """

    def __init__(self, *, vocab_size: int, seed: int) -> None:
        if vocab_size <= LOWEST_TOKEN:
            raise ConfigError(f"vocab_size must be above {LOWEST_TOKEN}, got {vocab_size}")
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)
        self._fresh = np.random.default_rng()
        self.share_anew()

    def share_anew(self) -> None:
        """From now on, let all hash ids stand for other tokens."""
        self._salt = np.uint64(secrets.randbits(64))

    def draw(self, num_tokens: int) -> list[int]:
        """Draw a prompt that shares nothing."""
        num_fresh = min(num_tokens, _NUM_FRESH)
        return self._draw(self._fresh, num_fresh) + self._draw(self._rng, num_tokens - num_fresh)

    def draw_for(self, request: WorkloadRequest) -> list[int]:
        """Draw a request's prompt; equal hash ids are equal tokens."""
        if not request.hash_ids:
            return self.draw(request.num_prompt_tokens)
        num_own = max(0, request.num_prompt_tokens - len(request.hash_ids) * HASH_BLOCK)
        num_shared = request.num_prompt_tokens - num_own
        shared: list[int] = self._shared(request.hash_ids)[:num_shared].tolist()
        return shared + self.draw(num_own)

    def _shared(self, hash_ids: Sequence[int]) -> np.ndarray:
        """Return the tokens of these blocks, a function of the ids and the salt: int [N]."""
        numbers = np.array([hash_id % 2**64 for hash_id in hash_ids], np.uint64)
        places = np.arange(HASH_BLOCK, dtype=np.uint64)
        bits = _mixed(self._salt + (numbers[:, np.newaxis] * np.uint64(HASH_BLOCK) + places))
        tokens: np.ndarray = np.uint64(LOWEST_TOKEN) + bits.ravel() % np.uint64(
            self._vocab_size - LOWEST_TOKEN
        )
        return tokens

    def _draw(self, rng: np.random.Generator, num_tokens: int) -> list[int]:
        ids: list[int] = rng.integers(LOWEST_TOKEN, self._vocab_size, size=num_tokens).tolist()
        return ids


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return random bits that are a function of each value, after SplitMix64 (Steele et al., 2014).

    A generator for each block would take several times as long, and no answers are read while a
    long prompt is drawn.

    Args:
        values: uint64, any shape.
    """
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed
