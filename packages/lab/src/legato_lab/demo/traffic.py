"""The demo's traffic, the same for every policy and sized to the machine."""

import msgspec

from legato.core.errors import ConfigError
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel

_NUM_STREAMS = 8
_STREAM_PROMPT = 64
_LONGEST = 7000
_SHORTEST = 250
_COMPUTE_S = 4.0
"""The longest time for the long prompt alone; the four policies then take less than a minute."""
_CHUNK = 512
_SLO_STEPS = 6
"""The ITL SLO in steps of the streams alone.

Still faster than anyone reads, and it leaves most of each step to the prompt.
"""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Running streams, and a long prompt that comes after a while.

    Attributes:
        stream_prompt, long_prompt: lengths in tokens.
        itl_slo_s: the streams' promise.
        steady_s: how long the streams run before the long prompt comes.
        tail_s: how long they are watched after its first token.
    """

    num_streams: int = _NUM_STREAMS
    stream_prompt: int = _STREAM_PROMPT
    long_prompt: int
    itl_slo_s: float
    steady_s: float = 1.5
    tail_s: float = 1.0


def sized_traffic(
    model: StepTimeModel,
    max_model_len: int,
    *,
    itl_slo_s: float | None = None,
    long_prompt: int | None = None,
) -> Traffic:
    """Size the traffic so that this machine serves it in a short time.

    Args:
        model: the machine's step times.
        itl_slo_s: None means six times the time of a step of the streams alone.
        long_prompt: None means as long as four seconds of computing allow.

    Raises:
        ConfigError: the long prompt does not fit into the model's context.
    """
    longest = max_model_len - _STREAM_PROMPT
    if long_prompt is None:
        lengths = range(_SHORTEST, min(_LONGEST, longest) + 1, _SHORTEST)
        fitting = [length for length in lengths if _compute_s(model, length) <= _COMPUTE_S]
        long_prompt = max(fitting, default=_SHORTEST)
    if long_prompt > longest:
        raise ConfigError(f"the long prompt must have at most {longest} tokens, not {long_prompt}")
    return Traffic(
        long_prompt=long_prompt,
        itl_slo_s=itl_slo_s or round(_SLO_STEPS * _streams_s(model), 3),
    )


def _streams_s(model: StepTimeModel) -> float:
    """Return the time of a step of the streams alone."""
    shape = StepShape()
    for _ in range(_NUM_STREAMS):
        shape.add_decode(2 * _STREAM_PROMPT)
    return model.seconds(shape)


def _compute_s(model: StepTimeModel, num_tokens: int) -> float:
    """Return the time that a prompt takes alone."""
    total_s = 0.0
    for start in range(0, num_tokens, _CHUNK):
        shape = StepShape()
        shape.add_prefill(start, min(_CHUNK, num_tokens - start), samples=False)
        total_s += model.seconds(shape)
    return total_s
