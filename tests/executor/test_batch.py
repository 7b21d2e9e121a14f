"""The packed batch, field by field, against loops over its chunks and their tokens."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.core.plan import ScheduledChunk, StepPlan
from legato.core.request import AddRequest
from legato.core.rows import CPU_ROWS
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.executor.attention.context import slot_runs
from legato.executor.batch import PackedBatch, pack
from legato.executor.sequence import SequenceState

CPU = torch.device("cpu")
BLOCK_SIZES = (1, 4, 16)


@dataclass
class Step:
    """What is packed; `tokens` are those of each request that the executor may know."""

    block_size: int
    chunks: list[ScheduledChunk]
    tokens: list[list[int]]

    def pack(self) -> PackedBatch:
        sequences = [
            _sequence(c.request_id, t) for c, t in zip(self.chunks, self.tokens, strict=True)
        ]
        return pack(
            self.chunks, sequences, block_size=self.block_size, device=CPU, padding=CPU_ROWS
        )


def _sequence(request_id: str, tokens: list[int]) -> SequenceState:
    prompt, output = tokens[:1], tokens[1:]
    params = SamplingParams(max_tokens=len(output) + 1)
    message = AddRequest(request_id=request_id, prompt_token_ids=token_array(prompt), params=params)
    sequence = SequenceState(message)
    for token in output:
        sequence.append(token)
    return sequence


@st.composite
def steps(draw: st.DrawFn) -> Step:
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    chunks: list[ScheduledChunk] = []
    tokens: list[list[int]] = []
    for i in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, 40))
        num_tokens = draw(st.integers(1, 3) | st.integers(1, 40))
        num_samples = draw(st.integers(0, min(num_tokens, 4)))
        num_blocks = -(-(start + num_tokens) // block_size) + draw(st.integers(0, 2))
        # Often side by side, so that there are runs.
        ids = draw(
            st.integers(0, 500).map(lambda first, n=num_blocks: range(first, first + n))
            | st.lists(st.integers(0, 9), min_size=num_blocks, max_size=num_blocks)
        )
        chunks.append(ScheduledChunk(str(i), start, num_tokens, tuple(ids), num_samples, "prefill"))
        num_more = draw(st.integers(0, 3))
        tokens.append([1000 * i + position for position in range(start + num_tokens + num_more)])
    return Step(block_size, chunks, tokens)


@given(steps())
def test_every_field_says_what_loops_would(step: Step) -> None:
    batch = step.pack()
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sample_rows: list[int] = []
    query_start = [0]
    for chunk, tokens in zip(step.chunks, step.tokens, strict=True):
        for position in range(chunk.start, chunk.end):
            input_ids.append(tokens[position])
            block = chunk.block_ids[position // step.block_size]
            slots.append(block * step.block_size + position % step.block_size)
            if position >= chunk.end - chunk.num_samples:
                sample_rows.append(len(positions))
            positions.append(position)
        query_start.append(len(positions))
    assert_padded(batch.input_ids, input_ids)
    assert_padded(batch.positions, positions)
    assert_padded(batch.sample_rows, sample_rows)
    assert batch.slot_mapping.tolist() == slots
    assert batch.query_start.tolist() == query_start
    assert batch.context_len.tolist() == [chunk.end for chunk in step.chunks]
    for row, chunk in zip(batch.block_table, step.chunks, strict=True):
        behind = batch.block_table.shape[1] - len(chunk.block_ids)
        assert row.tolist() == [*chunk.block_ids, *[0] * behind]
    assert {a.dtype for a in (batch.query_start, batch.context_len, batch.block_table)} == {
        np.dtype(np.int32)
    }


def assert_padded(rows: torch.Tensor, expected: list[int]) -> None:
    assert rows.dtype == torch.int64
    assert len(rows) == CPU_ROWS.padded(len(expected))
    assert rows.tolist() == expected + [0] * (len(rows) - len(expected))


@given(steps())
def test_runs_are_the_slots_in_order_and_as_long_as_can_be(step: Step) -> None:
    for chunk, runs in zip(step.chunks, slot_runs(step.pack(), step.block_size), strict=True):
        num_blocks = -(-chunk.end // step.block_size)
        slots = [slot for start, end in runs for slot in range(start, end)]
        assert slots == [
            block * step.block_size + offset
            for block in chunk.block_ids[:num_blocks]
            for offset in range(step.block_size)
        ]
        assert all(end != start for (_, end), (start, _) in pairwise(runs))


def test_a_table_that_grew_is_packed_anew() -> None:
    """Blocks are remembered from step to step, by the table that a plan gives."""
    sequence = _sequence("a", [5, 6, 7])
    tables = []
    for block_ids in ((3,), (3, 8), (3, 8), (4, 9)):
        chunk = ScheduledChunk("a", 2, 1, block_ids, 1, "decode")
        batch = pack([chunk], [sequence], block_size=4, device=CPU, padding=CPU_ROWS)
        tables.append(batch.block_table.tolist())
    assert tables == [[[3]], [[3, 8]], [[3, 8]], [[4, 9]]]


@given(step=steps(), data=st.data())
def test_the_first_rows_are_packed_as_if_there_were_no_others(
    step: Step, data: st.DataObject
) -> None:
    """Sampled rows stay as many, so that matrix kernels for them are compiled."""
    whole = step.pack()
    plan = StepPlan(step_id=0, chunks=tuple(step.chunks))
    num_rows = data.draw(st.integers(1, plan.num_tokens))
    chunks = plan.first_rows(num_rows).chunks
    alone = Step(step.block_size, list(chunks), step.tokens[: len(chunks)]).pack()
    first = whole.first_rows(num_rows)
    assert first.input_ids.tolist() == alone.input_ids[:num_rows].tolist()
    assert first.positions.tolist() == alone.positions[:num_rows].tolist()
    num_samples = sum(chunk.num_samples for chunk in chunks)
    assert first.sample_rows[:num_samples].tolist() == alone.sample_rows[:num_samples].tolist()
    assert len(first.sample_rows) == len(whole.sample_rows)
    assert all(row < num_rows for row in first.sample_rows.tolist())
    assert first.slot_mapping.tolist() == alone.slot_mapping.tolist()
    assert first.query_start.tolist() == alone.query_start.tolist()
    assert first.context_len.tolist() == alone.context_len.tolist()
    assert slot_runs(first, step.block_size) == slot_runs(alone, step.block_size)
    assert {a.dtype for a in (first.query_start, first.context_len, first.block_table)} == {
        np.dtype(np.int32)
    }
