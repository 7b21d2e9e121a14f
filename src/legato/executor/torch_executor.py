"""Runs step plans on a torch model."""

import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from typing import TypeVar

import torch

from legato.core.outputs import TokenLogprobs
from legato.core.plan import BlockMove, ChunkResult, Fault, StepPlan, StepResult
from legato.core.request import AddRequest
from legato.executor.attention.base import AttentionBackend
from legato.executor.batch import PackedBatch, pack
from legato.executor.constraint import Constraint
from legato.executor.host_cache import HostCache
from legato.executor.logprobs import compute_logprobs
from legato.executor.mask_thread import MaskThread
from legato.executor.memory import raising_memory_error
from legato.executor.sampler import NO_TOKEN, sample
from legato.executor.sequence import SamplingRow, SequenceState
from legato.grammar.compiled import Grammar
from legato.model.base import Model

_Value = TypeVar("_Value")

_LOGITS_ROWS = 128
"""Rows of a prompt whose logits are in memory at once: [128, V] float32."""
_ALL_FORBIDDEN = Fault(
    "the request's own settings forbid every token that could come next", is_asked_for=True
)
_MASK_WAIT_S = 0.002
"""How long a step waits for masks, where it has chunks that need none."""


class TorchExecutor:
    """One packed forward pass a step, and the sampling of its rows, all of it in `submit`.

    It keeps each request's tokens between steps, so that a plan names only positions and blocks.

    Args:
        num_host_slots: blocks that host memory is kept for.
        grammar: of a request's output, before its first token; asked by the request's id.
    """

    depth = 1

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        block_size: int,
        *,
        num_host_slots: int = 0,
        grammar: Callable[[str], Grammar] | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._block_size = block_size
        self._sequences: dict[str, SequenceState] = {}  # key request id
        self._result: StepResult | None = None
        self._host_cache = HostCache(attention.blocks, num_host_slots)
        self._grammar = grammar
        self._masks = MaskThread()

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
            chunks = self._advance(chunks)
        seconds = time.perf_counter() - started_s
        faults = {
            chunk.request_id: self._fault(chunk.request_id)
            for chunk in plan.chunks
            if chunk.request_id not in chunks
        }
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
        self._guess(plan, sequences)
        batch = pack(plan.chunks, sequences, block_size=self._block_size, device=self._model.device)
        attention = self._attention.begin_step(batch)
        hidden = self._model.forward(batch.input_ids, batch.positions, attention)
        prompt_logprobs = self._score_prompts(plan, batch, hidden)
        unsampled = self._unsampled(plan)
        sampled, logprobs = self._sample(plan, batch, hidden, unsampled)
        results = {
            chunk.request_id: chunk.result(
                sampled.get(chunk.request_id, ()),
                logprobs.get(chunk.request_id),
                prompt_logprobs.get(chunk.request_id),
            )
            if chunk.request_id not in unsampled
            else chunk.unsampled(
                prompt_logprobs.get(chunk.request_id),
                is_complete=unsampled[chunk.request_id].is_complete,
            )
            for chunk in plan.chunks
        }
        return {name: chunk for name, chunk in results.items() if NO_TOKEN not in chunk.token_ids}

    def _update_sequences(self, plan: StepPlan) -> None:
        for request_id in plan.ended_requests:
            # Unknown where the parts of a step that failed tell of it again.
            self._sequences.pop(request_id, None)
        for message in plan.new_requests:
            constraint = self._constraint(message)
            self._sequences[message.request_id] = SequenceState(message, constraint)

    def _constraint(self, message: AddRequest) -> Constraint | None:
        if message.params.structured_outputs is None:
            return None
        assert self._grammar is not None, "no grammars were promised"
        ends = (*message.eos_token_ids, *message.params.stop_token_ids)
        constraint = Constraint(self._grammar(message.request_id), ends)
        self._masks.begin([(constraint, ())])
        return constraint

    def _guess(self, plan: StepPlan, sequences: Sequence[SequenceState]) -> None:
        for chunk, sequence in zip(plan.chunks, sequences, strict=True):
            if chunk.draft_token_ids:
                sequence.guess(chunk.draft_token_ids)
                if sequence.constraint is not None:
                    self._masks.begin([(sequence.constraint, chunk.draft_token_ids)])

    def _advance(self, chunks: dict[str, ChunkResult]) -> dict[str, ChunkResult]:
        """Book what came of each chunk; returns as much of it as counts."""
        counted: dict[str, ChunkResult] = {}
        going_on: list[Constraint] = []
        for request_id, chunk in chunks.items():
            sequence = self._sequences[request_id]
            sequence.num_prompt_logprobs += len(chunk.prompt_logprobs or ())
            if sequence.constraint is not None and chunk.token_ids:
                num_taken = sequence.constraint.advance(chunk.token_ids)
                chunk = chunk.cut(num_taken, is_complete=sequence.constraint.is_complete)
                going_on.append(sequence.constraint)
            for token_id in chunk.token_ids:
                sequence.append(token_id)
            counted[request_id] = chunk
        self._masks.begin([(c, ()) for c in going_on if not c.has_ended])
        return {
            request_id: chunk
            for request_id, chunk in counted.items()
            if not self._error(request_id)
        }

    def _error(self, request_id: str) -> str:
        constraint = self._sequences[request_id].constraint
        return "" if constraint is None else constraint.error

    def _fault(self, request_id: str) -> Fault:
        error = self._error(request_id)
        return Fault(error, is_asked_for=True) if error else _ALL_FORBIDDEN

    def _unsampled(self, plan: StepPlan) -> dict[str, Constraint]:
        """Whose last rows are not sampled: nothing may come, or it is not known in time what may.

        A mask that takes long holds up nobody who needs none.
        """
        constrained = {
            chunk.request_id: constraint
            for chunk in plan.chunks
            if chunk.num_samples
            and (constraint := self._sequences[chunk.request_id].constraint) is not None
        }
        is_alone = len(constrained) == len(plan.chunks)
        wait({c.ready for c in constrained.values()}, None if is_alone else _MASK_WAIT_S)
        for constraint in constrained.values():
            if constraint.ready.done():
                constraint.ready.result()
        return {
            request_id: constraint
            for request_id, constraint in constrained.items()
            if constraint.has_ended or not constraint.ready.done()
        }

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
        self,
        plan: StepPlan,
        batch: PackedBatch,
        hidden: torch.Tensor,
        unsampled: Container[str],
    ) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprobs]]]:
        """A token for each sampled row, and log probabilities where asked for; key request id."""
        ids: list[str] = []
        rows: list[SamplingRow] = []
        places: list[int] = []  # among the sampled rows of the batch
        num_rows = 0
        for chunk in plan.chunks:
            num_rows += chunk.num_samples
            if chunk.request_id in unsampled:
                continue
            for later in reversed(range(chunk.num_samples)):
                ids.append(chunk.request_id)
                rows.append(self._sequences[chunk.request_id].sampling_row(chunk.end - later))
                places.append(num_rows - 1 - later)
        if not rows:
            return {}, {}
        logits = self._model.compute_logits(hidden[batch.sample_rows])[:num_rows]  # [S, V]
        if len(places) < num_rows:
            logits = logits[torch.tensor(places, device=logits.device)]
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
