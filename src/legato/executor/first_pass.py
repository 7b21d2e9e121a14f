"""The first forward pass, which rejects a broken model before any request waits for it.

Each weight may be finite and yet so large that products are not.
"""

from bisect import bisect_left
from collections.abc import Callable

import torch

from legato.core.errors import UnsupportedModelError
from legato.core.plan import ScheduledChunk, StepPlan
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.executor.attention.attention_backend import AttentionBackend
from legato.executor.batch import pack
from legato.executor.sequence import SequenceState
from legato.executor.state_cache import StateCache
from legato.model.model import Model

_MAX_TOKENS = 8


@torch.inference_mode()
def check_forward(
    model: Model,
    attention: AttentionBackend,
    *,
    block_size: int,
    vocab_size: int,
    max_len: int,
    num_layers: int | None = None,
    states: StateCache | None = None,
) -> None:
    """Check that a forward pass over tokens from all over the vocabulary is finite.

    Args:
        attention: the check writes to the first blocks of each cache group.
        max_len: positions of the model and of the cache.
        num_layers: of the model; None if all have keys and values in the cache.
        states: of the recurrent layers; None if the model has none.

    Raises:
        UnsupportedModelError: a layer, or the output projection, returns NaN or infinities.
    """
    plan = first_plan(
        vocab_size=vocab_size,
        max_len=max_len,
        block_size=block_size,
        num_groups=len(attention.blocks),
    )
    sequences = [SequenceState(request) for request in plan.new_requests]
    batch = pack(
        plan.chunks, sequences, block_size=block_size, device=model.device, padding=model.rows
    )

    def values(first: int | None) -> torch.Tensor:
        step = attention.begin_step(batch)
        hidden = model.forward(
            batch.input_ids,
            batch.positions,
            step,
            states=None if states is None else states.begin_step(batch),
            num_layers=first,
        )
        return hidden if first is not None else model.compute_logits(hidden)

    check_layers(values, num_layers or model.cache.num_layers, model.dtype)


def first_plan(*, vocab_size: int, max_len: int, block_size: int, num_groups: int = 1) -> StepPlan:
    """Return a plan for a short prompt from all over the vocabulary, in the first blocks.

    Args:
        num_groups: groups of the cache.
    """
    num_tokens = min(_MAX_TOKENS, max_len, vocab_size)
    prompt = range(0, vocab_size, vocab_size // num_tokens)[:num_tokens]
    request = AddRequest(
        request_id="first-pass",
        prompt_token_ids=token_array(prompt),
        params=SamplingParams(temperature=0.0, max_tokens=1),
    )
    blocks = tuple(range(-(-num_tokens // block_size)))
    windows = (blocks,) * (num_groups - 1)
    chunk = ScheduledChunk(
        request.request_id, 0, num_tokens, blocks, 1, "prefill", window_block_ids=windows
    )
    return StepPlan(step_id=0, chunks=(chunk,), new_requests=(request,))


def check_layers(
    values: Callable[[int | None], torch.Tensor], num_layers: int, dtype: torch.dtype
) -> None:
    """Name the first layer with a result that is not finite.

    Args:
        values: returns the hidden states after so many layers; for None, the logits.

    Raises:
        UnsupportedModelError: a layer, or the output projection, returns NaN or infinities.
    """
    if _is_finite(values(None)):
        return
    counts = range(1, num_layers + 1)
    num_sound = bisect_left(counts, True, key=lambda count: not _is_finite(values(count)))
    where = f"model.layers.{num_sound}" if num_sound < len(counts) else "the output projection"
    reason = "the checkpoint is damaged"
    if dtype == torch.float16:
        reason += ", or its values are too large for float16: try --dtype bfloat16"
    raise UnsupportedModelError(f"{where} computes NaN or infinities: {reason}")


def _is_finite(values: torch.Tensor) -> bool:
    return bool(values.isfinite().all())
