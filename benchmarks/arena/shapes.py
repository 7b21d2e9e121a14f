"""The four shapes of the arena, with contexts of 128k tokens, and sizes of requests on them."""

from benchmarks.arena.case import Shape
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape
from legato_lab.simulation.profiles import load_profile

MAX_MODEL_LEN = 131_072

_PROFILES = {
    "135m": "smollm2-135m-cpu",
    "7b": "7b-gqa-cpu",
    "70b": "llama-3.1-70b-h100-tp4",
    "hybrid": "qwen3.5-27b-h100-tp2",
}
"""Key a shape's name, value its profile."""
_CACHE = 4 * MAX_MODEL_LEN
"""Tokens in the cache: the arena is about time first; scarce memory has cases of its own."""


def shapes() -> dict[str, Shape]:
    """Return the shapes; key the name."""
    return {name: _shape(name, profile) for name, profile in _PROFILES.items()}


def stream_s(costs: StepCosts, context: int = 1000) -> float:
    """Return the seconds of a step with one stream."""
    shape = StepShape()
    shape.add_decode(context)
    return costs.seconds(shape)


def alone_s(costs: StepCosts, num_tokens: int, most_tokens: int, turnaround_s: float) -> float:
    """Return the time to first token of a prompt alone on a machine.

    Args:
        most_tokens: of a step.
    """
    seconds = 0.0
    for start in range(0, num_tokens, most_tokens):
        shape = StepShape()
        size = min(most_tokens, num_tokens - start)
        shape.add_prefill(start, size, samples=start + size == num_tokens)
        seconds += turnaround_s + costs.seconds(shape)
    return seconds


def prompt_of(shape: Shape, seconds: float) -> int:
    """Return the length of a prompt that takes so long alone, in steps of 512 tokens."""
    shortest, longest = 1, shape.max_model_len - 1000
    while longest - shortest > 16:
        middle = (shortest + longest) // 2
        if alone_s(shape.costs, middle, 512, shape.turnaround_s) > seconds:
            longest = middle
        else:
            shortest = middle
    return shortest


def _shape(name: str, profile_name: str) -> Shape:
    profile = load_profile(profile_name)
    return Shape(
        name=name,
        costs=profile.costs,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_tokens=max(_CACHE, profile.kv_cache_tokens),
    )
