"""What every policy of the demo gets to serve, sized to the machine."""

import msgspec

from legato.core.errors import ConfigError
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel

_NUM_STREAMS = 8
_STREAM_PROMPT = 64
_LONGEST = 7000
_SHORTEST = 250
_COMPUTE_S = 4.0
"""How long the long prompt may take alone: the four policies then take less than a minute."""
_CHUNK = 512
_SLO_STEPS = 6
"""The ITL SLO in steps of the streams alone: nobody reads faster than that, and most of each step
is for the prompt."""


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Streams that run, and a long prompt that comes when they have run for a while.

    Attributes:
        stream_prompt, long_prompt: lengths in tokens.
        itl_slo_s: what the streams are promised.
        steady_s: how long the streams run before it comes.
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
    """Traffic that this machine serves in a time that one likes to watch.

    Args:
        model: that knows the machine.
        itl_slo_s: None takes six times what a step of the streams alone takes.
        long_prompt: None takes what can be computed in four seconds.

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
    """How long a step of the streams alone takes."""
    shape = StepShape()
    for _ in range(_NUM_STREAMS):
        shape.add_decode(2 * _STREAM_PROMPT)
    return model.seconds(shape)


def _compute_s(model: StepTimeModel, num_tokens: int) -> float:
    """How long a prompt takes alone."""
    total_s = 0.0
    for start in range(0, num_tokens, _CHUNK):
        shape = StepShape()
        shape.add_prefill(start, min(_CHUNK, num_tokens - start), samples=False)
        total_s += model.seconds(shape)
    return total_s
