"""Logits of a prompt that is computed in chunks, over scattered blocks of a cache."""

from dataclasses import replace
from itertools import pairwise

import torch

from legato.core.plan import FIRST_STATE, ZERO_STATE, ScheduledChunk, StateChange
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.executor.attention.native_backend import NativeAttentionBackend
from legato.executor.attention.torch_backend import TorchAttentionBackend
from legato.executor.sequence import SequenceState
from legato.executor.state_cache import StateCache
from legato.model.base import Model
from legato.model.decoder import Decoder
from legato.model.native import ReadsNativeCache
from tests.executor.test_native import BLOCK_SIZE, CPU, Runner

CHUNKS = (0, 50, 51, 90)
"""Bounds of the chunks of a prompt."""


def chunked_logits(model: Model, prompt: list[int], *, is_quantized: bool = False) -> torch.Tensor:
    """Return logits [T, V] of a prompt as long as `CHUNKS` says.

    Args:
        is_quantized: whether the cache is int8.
    """
    sizes = {"num_blocks": 3, "block_size": BLOCK_SIZE}
    cache = replace(model.cache, is_quantized=is_quantized)
    backend = (
        NativeAttentionBackend(model, cache, **sizes)
        if isinstance(model, ReadsNativeCache)
        else TorchAttentionBackend(cache, **sizes, device=CPU)
    )
    if not is_quantized:
        backend.blocks[0].fill_(torch.nan)
    shapes = model.spec.states if isinstance(model, Decoder) else ()
    states = StateCache(shapes, num_slots=4, dtype=model.dtype, device=CPU) if shapes else None
    runner = Runner(model, backend, states)
    message = AddRequest(
        request_id="0", prompt_token_ids=token_array(prompt), params=SamplingParams(max_tokens=1)
    )
    sequence = SequenceState(message)
    slots = (ZERO_STATE, FIRST_STATE, FIRST_STATE + 1, FIRST_STATE)
    for (start, end), change in zip(pairwise(CHUNKS), pairwise(slots), strict=True):
        state = StateChange(*change) if shapes else None
        chunk = ScheduledChunk("0", start, end - start, (2, 0, 1), 1, "prefill", state=state)
        runner.step([chunk], [sequence])
    return torch.cat(runner.logits)
