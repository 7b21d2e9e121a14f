"""Runs step plans on a torch model."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from legato.core.outputs import TokenLogprobs
from legato.core.plan import BlockMove, ChunkResult, Fault, StepPlan, StepResult
from legato.executor.attention.base import AttentionBackend
from legato.executor.batch import PackedBatch, pack
from legato.executor.host_cache import HostCache
from legato.executor.logprobs import compute_logprobs
from legato.executor.memory import raising_memory_error
from legato.executor.sampler import NO_TOKEN, sample
from legato.executor.sequence import SamplingRow, SequenceState
from legato.model.base import Model

_Value = TypeVar("_Value")

_LOGITS_ROWS = 128
"""Rows of a prompt whose logits are in memory at once: [128, V] float32."""
_ALL_FORBIDDEN = Fault(
    "the request's own settings forbid every token that could come next", is_out_of_memory=False
)


class TorchExecutor:
    """One packed forward pass a step, and the sampling of its rows, all of it in `submit`.

    It keeps each request's tokens between steps, so that a plan names only positions and blocks.

    Args:
        num_host_slots: blocks that host memory is kept for.
    """

    depth = 1

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        block_size: int,
        *,
        num_host_slots: int = 0,
    ) -> None:
        self._model = model
        self._attention = attention
        self._block_size = block_size
        self._sequences: dict[str, SequenceState] = {}  # key request id
        self._result: StepResult | None = None
        self._host_cache = HostCache(attention.blocks, num_host_slots)

    def move(self, moves: Sequence[BlockMove]) -> None:
        self._host_cache.move(moves)

    def submit(self, plan: StepPlan) -> None:
        started_s = time.perf_counter()
        with (
            raising_memory_error(),
            torch.inference_mode(),
            _torch_threads(self._model.num_torch_threads),
        ):
            chunks = self._run(plan)
            if self._model.device.type == "cuda":
                # A step that samples nothing would seem to take no time.
                torch.cuda.synchronize(self._model.device)
            # Last, when nothing can fail any more: a step that raised must leave no trace.
            self._advance(chunks)
        seconds = time.perf_counter() - started_s
        faults = {c.request_id: _ALL_FORBIDDEN for c in plan.chunks if c.request_id not in chunks}
        self._result = StepResult(
            step_id=plan.step_id, seconds=seconds, chunks=chunks, faults=faults
        )

    def collect(self) -> StepResult:
        result, self._result = self._result, None
        assert result is not None, "nothing was submitted"
        return result

    def _run(self, plan: StepPlan) -> dict[str, ChunkResult]:
        """What came of each chunk whose request may have a next token; key request id."""
        self._update_sequences(plan)
        sequences = [self._sequences[chunk.request_id] for chunk in plan.chunks]
        for chunk, sequence in zip(plan.chunks, sequences, strict=True):
            if chunk.draft_token_ids:
                sequence.guess(chunk.draft_token_ids)
        batch = pack(plan.chunks, sequences, block_size=self._block_size, device=self._model.device)
        attention = self._attention.begin_step(batch)
        hidden = self._model.forward(batch.input_ids, batch.positions, attention)
        prompt_logprobs = self._score_prompts(plan, batch, hidden)
        sampled, logprobs = self._sample(plan, batch, hidden)
        results = {
            chunk.request_id: chunk.result(
                sampled.get(chunk.request_id, ()),
                logprobs.get(chunk.request_id),
                prompt_logprobs.get(chunk.request_id),
            )
            for chunk in plan.chunks
        }
        return {name: chunk for name, chunk in results.items() if NO_TOKEN not in chunk.token_ids}

    def _update_sequences(self, plan: StepPlan) -> None:
        for request_id in plan.ended_requests:
            # Unknown where the parts of a step that failed tell of it again.
            self._sequences.pop(request_id, None)
        for message in plan.new_requests:
            self._sequences[message.request_id] = SequenceState(message)

    def _advance(self, chunks: dict[str, ChunkResult]) -> None:
        for request_id, chunk in chunks.items():
            sequence = self._sequences[request_id]
            sequence.num_prompt_logprobs += len(chunk.prompt_logprobs or ())
            for token_id in chunk.token_ids:
                sequence.append(token_id)

    def _score_prompts(
        self, plan: StepPlan, batch: PackedBatch, hidden: torch.Tensor
    ) -> dict[str, list[TokenLogprobs]]:
        """Prompt log probabilities; key request id, for those that asked."""
        scores: dict[str, list[TokenLogprobs]] = {}
        for chunk, row in zip(plan.chunks, batch.query_start.tolist(), strict=False):
            sequence = self._sequences[chunk.request_id]
            num_top = sequence.message.params.prompt_logprobs
            # Row p scores token p + 1; tokens [1, scored] were returned before a preemption.
            first = max(chunk.start, sequence.num_prompt_logprobs)
            last = min(chunk.end, sequence.num_prompt_tokens - 1)
            if num_top is None or first >= last:
                continue
            rows = hidden[row + first - chunk.start : row + last - chunk.start]
            tokens = torch.from_numpy(sequence.token_ids[first + 1 : last + 1])
            scores[chunk.request_id] = self._logprobs(rows, tokens.to(hidden.device), num_top)
        return scores

    def _logprobs(
        self, hidden: torch.Tensor, tokens: torch.Tensor, num_top: int
    ) -> list[TokenLogprobs]:
        """Of `tokens` [N] after the rows [N, E], a few rows at a time."""
        entries: list[TokenLogprobs] = []
        for rows, chosen in zip(
            torch.split(hidden, _LOGITS_ROWS), torch.split(tokens, _LOGITS_ROWS), strict=True
        ):
            logits = self._model.compute_logits(rows)
            entries += compute_logprobs(logits, chosen, [num_top] * len(chosen))
        return entries

    def _sample(
        self, plan: StepPlan, batch: PackedBatch, hidden: torch.Tensor
    ) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprobs]]]:
        """A token for each sampled row, and log probabilities where asked for; key request id."""
        ids: list[str] = []
        rows: list[SamplingRow] = []
        for chunk in plan.chunks:
            for num_tokens in range(chunk.end - chunk.num_samples + 1, chunk.end + 1):
                ids.append(chunk.request_id)
                rows.append(self._sequences[chunk.request_id].sampling_row(num_tokens))
        if not rows:
            return {}, {}
        logits = self._model.compute_logits(hidden[batch.sample_rows])[: len(rows)]  # [S, V]
        tokens = sample(logits, rows)
        return _grouped(ids, tokens.tolist()), _sample_logprobs(ids, rows, logits, tokens)


@contextmanager
def _torch_threads(count: int | None) -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(count or usual)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def _sample_logprobs(
    ids: list[str], rows: list[SamplingRow], logits: torch.Tensor, tokens: torch.Tensor
) -> dict[str, list[TokenLogprobs]]:
    asking = [
        i
        for i, (row, token_id) in enumerate(zip(rows, tokens.tolist(), strict=True))
        if row.params.logprobs is not None and token_id != NO_TOKEN
    ]
    if not asking:
        return {}
    index = torch.tensor(asking, device=logits.device)
    num_top = [rows[i].params.logprobs or 0 for i in asking]
    entries = compute_logprobs(logits[index], tokens[index], num_top)
    return _grouped([ids[i] for i in asking], entries)


def _grouped(ids: Iterable[str], values: Iterable[_Value]) -> dict[str, list[_Value]]:
    groups: dict[str, list[_Value]] = {}
    for request_id, value in zip(ids, values, strict=True):
        groups.setdefault(request_id, []).append(value)
    return groups
