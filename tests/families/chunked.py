"""Logits of a prompt that is computed in chunks, over scattered blocks of a cache."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from legato.core.plan import FIRST_STATE, ZERO_STATE, ScheduledChunk, StateChange
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.executor.attention.attention_backend import AttentionBackend
from legato.executor.attention.native_backend import NativeAttentionBackend, NativeGroupsBackend
from legato.executor.attention.torch_backend import TorchAttentionBackend
from legato.executor.attention.torch_groups import TorchGroupsBackend
from legato.executor.sequence import SequenceState
from legato.executor.state_cache import StateCache
from legato.model.decoder import Decoder
from legato.model.model import CacheGroup, Model
from legato.model.native_attention import ReadsNativeCache
from tests.executor.test_native import BLOCK_SIZE, CPU, Runner

CHUNKS = (0, 50, 51, 90)
"""Bounds of the chunks of a prompt."""
_BLOCKS = ((2, 0, 1), (1, 2, 0))
"""A prompt's blocks in the first group of the cache, and in the second."""


def chunked_logits(
    model: Model,
    prompt: list[int],
    *,
    bounds: tuple[int, int, int, int] = CHUNKS,
    is_quantized: bool = False,
) -> torch.Tensor:
    """Return logits [T, V] of a prompt.

    Args:
        bounds: of its three chunks.
        is_quantized: whether the cache is int8.
    """
    cache = replace(model.cache, is_quantized=is_quantized)
    groups = (cache.whole,) if cache.has_one_geometry else cache.groups(len(prompt))
    backend = _backend(model, groups)
    for blocks in () if is_quantized else backend.blocks:
        blocks.fill_(torch.nan)
    shapes = model.spec.states if isinstance(model, Decoder) else ()
    states = StateCache(shapes, num_slots=4, dtype=model.dtype, device=CPU) if shapes else None
    runner = Runner(model, backend, states)
    message = AddRequest(
        request_id="0", prompt_token_ids=token_array(prompt), params=SamplingParams(max_tokens=1)
    )
    sequence = SequenceState(message)
    slots = (ZERO_STATE, FIRST_STATE, FIRST_STATE + 1, FIRST_STATE)
    for (start, end), change in zip(pairwise(bounds), pairwise(slots), strict=True):
        state = StateChange(*change) if shapes else None
        own, *windows = _BLOCKS[: len(groups)]
        chunk = ScheduledChunk(
            *("0", start, end - start, own, 1, "prefill"),
            state=state,
            window_block_ids=tuple(windows),
        )
        runner.step([chunk], [sequence])
    return torch.cat(runner.logits)


def _backend(model: Model, groups: Sequence[CacheGroup]) -> AttentionBackend:
    sizes = {"num_blocks": 3, "block_size": BLOCK_SIZE}
    caches = [group.cache for group in groups]
    if isinstance(model, ReadsNativeCache):
        native = [NativeAttentionBackend(model, cache, **sizes) for cache in caches]
        return NativeGroupsBackend(groups, native)
    plain = [TorchAttentionBackend(cache, **sizes, device=CPU) for cache in caches]
    return TorchGroupsBackend(groups, plain)
