"""The paged backend against a dense softmax, over random tables, chunks and windows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.core.plan import ScheduledChunk
from legato.core.request import AddRequest
from legato.core.rows import CPU_ROWS
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.executor.attention.partial import attend_part, merge_parts
from legato.executor.attention.torch_backend import TorchAttentionBackend
from legato.executor.batch import pack
from legato.executor.sequence import SequenceState
from legato.model.model import CacheSpec, LayerCache
from tests.profiles import examples

BLOCK_SIZE, NUM_BLOCKS, HEADS, KV_HEADS, HEAD_DIM = 4, 200, 6, 2, 16
CPU = torch.device("cpu")


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
) -> torch.Tensor:
    """[T, H, D] queries of the last T positions over [S, K, D] keys."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", query, key) * query.shape[-1] ** -0.5
    position = torch.arange(key.shape[0])
    row = position[-query.shape[0] :, None]
    hidden = position > row
    if window is not None:
        hidden |= position <= row - window
    scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), value)


@given(
    seed=st.integers(0, 2**16),
    prompts=st.lists(
        st.tuples(st.integers(0, 200), st.integers(1, 40), st.booleans()), min_size=1, max_size=5
    ),
    window=st.none() | st.integers(1, 60),
    has_values=st.booleans(),
)
@examples(60)
def test_equals_dense_attention(
    seed: int, prompts: list[tuple[int, int, bool]], window: int | None, has_values: bool
) -> None:
    """Each request has (context, chunk) tokens and blocks in one run or scattered.

    A later layer that has no keys of its own reads the same ones.
    """
    torch.manual_seed(seed)
    layers = (LayerCache(KV_HEADS, HEAD_DIM, window),) * 2
    spec = CacheSpec(layers=layers, dtype=torch.float32, has_values=has_values)
    num_blocks = NUM_BLOCKS * len(prompts)
    backend = TorchAttentionBackend(spec, num_blocks=num_blocks, block_size=BLOCK_SIZE, device=CPU)
    backend.blocks[0].fill_(torch.nan)  # what was not written must not be read
    tables, keys, values, sequences = [], [], [], []
    for i, (context, chunk, scattered) in enumerate(prompts):
        order = torch.randperm(NUM_BLOCKS) if scattered else torch.arange(NUM_BLOCKS)
        num_blocks = -(-(context + chunk) // BLOCK_SIZE)
        tables.append(tuple(int(b) + i * NUM_BLOCKS for b in order[:num_blocks]))
        keys.append(torch.randn(context + chunk, KV_HEADS, HEAD_DIM))
        values.append(torch.randn(context + chunk, KV_HEADS, HEAD_DIM) if has_values else keys[-1])
        message = AddRequest(
            request_id=str(i),
            prompt_token_ids=token_array(range(context + chunk)),
            params=SamplingParams(max_tokens=1),
        )
        sequences.append(SequenceState(message))

    def run(starts: list[int], ends: list[int], query: torch.Tensor) -> torch.Tensor:
        chunks = [
            ScheduledChunk(str(i), s, e - s, tables[i], 1, "prefill")
            for i, (s, e) in enumerate(zip(starts, ends, strict=True))
            if e > s
        ]
        batch = pack(
            chunks,
            [sequences[int(c.request_id)] for c in chunks],
            block_size=BLOCK_SIZE,
            device=CPU,
            padding=CPU_ROWS,
        )
        step = backend.begin_step(batch)
        new_keys = torch.cat([k[s:e] for k, s, e in zip(keys, starts, ends, strict=True)])
        new_values = torch.cat([v[s:e] for v, s, e in zip(values, starts, ends, strict=True)])
        settings = {"scale": HEAD_DIM**-0.5, "sliding_window": window}
        out = step.attend(1, query, new_keys, new_values, **settings)
        assert torch.equal(step.attend(1, query, None, None, **settings), out)
        return out

    contexts = [context for context, _, _ in prompts]
    totals = [context + chunk for context, chunk, _ in prompts]
    if sum(contexts):
        run([0] * len(prompts), contexts, torch.zeros(sum(contexts), HEADS, HEAD_DIM))
    query = torch.randn(sum(totals) - sum(contexts), HEADS, HEAD_DIM)
    out = run(contexts, totals, query)
    row = 0
    for i, (_, chunk, _) in enumerate(prompts):
        expected = dense(query[row : row + chunk], keys[i], values[i], window)
        torch.testing.assert_close(out[row : row + chunk], expected, rtol=1e-4, atol=1e-5)
        row += chunk


@pytest.mark.parametrize("splits", [[10], [3, 7], [1, 4, 5]])
def test_parts_of_the_keys_add_up(splits: list[int]) -> None:
    torch.manual_seed(0)
    query = torch.randn(1, HEADS, 3, HEAD_DIM)
    key, value = torch.randn(2, 1, KV_HEADS, 10, HEAD_DIM)
    whole, _ = attend_part(query, key, value, scale=0.3, is_causal=False)
    parts = [
        attend_part(query, k, v, scale=0.3, is_causal=False)
        for k, v in zip(key.split(splits, 2), value.split(splits, 2), strict=True)
    ]
    torch.testing.assert_close(merge_parts(parts), whole, rtol=1e-5, atol=1e-6)
