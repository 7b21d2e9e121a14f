"""Two kinds of traffic, made up: bursts of prompts that share nothing, and conversations."""

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from legato_lab.simulation.workload import (
    HASH_BLOCK,
    Workload,
    WorkloadRequest,
    cut_to,
    num_hash_blocks,
)
from legato_lab.workload.quantiles import draw_quantiles

MAX_MODEL_LEN = 8192
"""Longest prompt plus output in tokens."""

_CODE = "prompt p10=147 p50=1469 p90=5188 p99=7436, output p10=7 p50=13 p90=55 p99=251"
_CHAT = "prompt p10=207 p50=1020 p90=2735 p99=4142, output p10=54 p50=129 p90=424 p99=601"
"""Lengths of the services in Azure's LLM inference traces of 2023."""

_MEAN_BURST, _WITHIN_BURST_S = 8, 0.05

_APPS = (0.4, 0.3, 0.2, 0.1)
"""Applications, by the share of the conversations that are theirs."""
_SYSTEM_BLOCKS = (1, 2, 3, 4)
"""What their system prompts take."""
_MEAN_TURNS = 6
_QUESTION, _DOCUMENT, _ANSWER = (100, 0.9), (2000, 0.6), (180, 0.7)
"""Medians, and standard deviations of the logarithm, in tokens."""
_WITH_DOCUMENT = 0.2
"""Share of the conversations that begin with one."""
_PAUSE_S = (12.0, 0.7)
"""Likewise of what passes between an answer and the next turn, in seconds."""
_READS_TOKEN_S = 0.05
"""What an answer takes for each of its tokens, if it comes as fast as it is read: turns come at
their times, even if the turn before failed."""
_EARLIEST_S = 600.0
"""Conversations that began longer before the start have ended."""
_IDS_OF_ONE = 2**10
"""Ids of blocks that are kept for each conversation, and for all applications together."""

Traffic = Callable[[float, float, int], Workload]
"""Takes the seconds in which requests come, how many a second, and the seed."""


def azure(seconds: float, rate_per_s: float, seed: int) -> Workload:
    """Half of Azure's code service, which comes in bursts, and half of its chats, at random."""
    rng = np.random.default_rng(seed)
    bursts_s = _poisson(rng, seconds, rate_per_s / 2 / _MEAN_BURST)
    sizes = rng.geometric(1.0 / _MEAN_BURST, size=len(bursts_s))
    code_s = [
        at_s
        for start_s, size in zip(bursts_s, sizes, strict=True)
        for at_s in start_s + np.cumsum(rng.exponential(_WITHIN_BURST_S, size))
    ]
    chats_s = _poisson(rng, seconds, rate_per_s / 2)
    return sorted(
        [*_of_lengths(_CODE, code_s, 2 * seed), *_of_lengths(_CHAT, chats_s, 2 * seed + 1)],
        key=lambda request: request.arrival_s,
    )


def conversations(seconds: float, rate_per_s: float, seed: int) -> Workload:
    """Turns of conversations. Each begins with all that was said before.

    All conversations of an application begin with its system prompt. Many are under way at the
    start, and nothing is cached, as in a fleet that is deployed anew under load.
    """
    rng = np.random.default_rng(seed)
    starts_s = _poisson(rng, _EARLIEST_S + seconds, rate_per_s / _MEAN_TURNS) - _EARLIEST_S
    turns = [
        turn
        for number, start_s in enumerate(starts_s, 1)
        for turn in _turns(rng, number, start_s, seconds)
    ]
    return sorted(turns, key=lambda turn: turn.arrival_s)


def _turns(
    rng: np.random.Generator, number: int, start_s: float, seconds: float
) -> Iterator[WorkloadRequest]:
    """Yield the turns of one conversation that come in time.

    Args:
        number: at least 1; no other has it.
        start_s: of its first turn, which may be before 0.
    """
    app = int(rng.choice(len(_APPS), p=_APPS))
    num_system = _SYSTEM_BLOCKS[app]
    system = tuple(range(app * max(_SYSTEM_BLOCKS), app * max(_SYSTEM_BLOCKS) + num_system))
    own = number * _IDS_OF_ONE
    num_said = num_system * HASH_BLOCK
    if rng.random() < _WITH_DOCUMENT:
        num_said += _tokens(rng, _DOCUMENT)
    at_s = start_s
    for _ in range(rng.geometric(1.0 / _MEAN_TURNS)):
        num_prompt = num_said + _tokens(rng, _QUESTION)
        num_output = _tokens(rng, _ANSWER)
        if num_prompt + num_output > MAX_MODEL_LEN or at_s >= seconds:
            return
        num_own = num_hash_blocks(num_prompt) - num_system
        if at_s >= 0.0:
            yield WorkloadRequest(
                float(at_s), num_prompt, num_output, hash_ids=(*system, *range(own, own + num_own))
            )
        num_said = num_prompt + num_output
        at_s += _READS_TOKEN_S * num_output + float(_drawn(rng, _PAUSE_S))


def _of_lengths(quantiles: str, arrivals_s: Sequence[float] | np.ndarray, seed: int) -> Workload:
    drawn = draw_quantiles(quantiles, len(arrivals_s), seed)
    return [
        msgspec.structs.replace(request, arrival_s=float(at_s))
        for request, at_s in zip(cut_to(drawn, MAX_MODEL_LEN), arrivals_s, strict=True)
    ]


def _poisson(rng: np.random.Generator, seconds: float, rate_per_s: float) -> np.ndarray:
    """Times at random, ascending: float [N]."""
    return np.sort(rng.uniform(0.0, seconds, rng.poisson(rate_per_s * seconds)))


def _tokens(rng: np.random.Generator, lengths: tuple[float, float]) -> int:
    return max(1, round(_drawn(rng, lengths)))


def _drawn(rng: np.random.Generator, lognormal: tuple[float, float]) -> float:
    median, sigma = lognormal
    return median * float(rng.lognormal(0.0, sigma))


TRAFFIC: dict[str, Traffic] = {"azure": azure, "conversations": conversations}
"""Key the name by which a user asks for it."""

RATES_PER_S = {"azure": 5.0, "conversations": 9.0}
"""By which three of the replicas that the benchmark starts have enough to do; key as above."""
