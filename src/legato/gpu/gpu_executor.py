"""Runs step plans on a GPU; the host prepares the next step while the GPU computes one."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from legato.core.outputs import TokenLogprobs, TokenScores
from legato.core.plan import BlockMove, StepPlan, StepResult
from legato.core.sampling_params import SamplingParams
from legato.executor.adjustments import asks_for_change
from legato.executor.cache_memory import raising_memory_error
from legato.executor.logprobs import Scores, score
from legato.executor.sequence import SamplingRow
from legato.executor.sequences import BegunStep, Sequences, StepOutcome, sampled_rows, scored_prompt
from legato.executor.torch_executor import LOGITS_ROWS
from legato.gpu.block_table import Int32s, Int64s
from legato.gpu.device import Device, Event
from legato.gpu.host_cache import GpuHostCache
from legato.gpu.sampler import check_sampled
from legato.gpu.step_inputs import StepSize
from legato.gpu.step_loader import StepLoader
from legato.gpu.step_program import Runner, StepProgram
from legato.grammar.matcher import Grammar

_NO_TOKENS = np.zeros(0, dtype=np.int64)
_AS_IT_IS = SamplingRow(SamplingParams(temperature=0.0), (), _NO_TOKENS, _NO_TOKENS)
"""A row without adjustments of its logits."""


class _Scored(NamedTuple):
    """Log probabilities in transfer to the host.

    Attributes:
        request_ids: the request of each position.
        num_top: most likely tokens of each position.
    """

    request_ids: list[str]
    scores: Scores
    num_top: list[int]


class _Flight(NamedTuple):
    """A step in flight on the device.

    Attributes:
        sampled: int32 [S] on the host; readable, like the next fields, once `done` is passed.
        pooled_sums: float64 [E]; key request id.
    """

    step: BegunStep
    num_known_rows: Mapping[str, int]
    sampled: torch.Tensor
    logprobs: Sequence[_Scored]
    prompt_logprobs: Sequence[tuple[str, Scores]]
    pooled_sums: Mapping[str, torch.Tensor]
    begun: Event
    done: Event


class GpuExecutor:
    """Launches steps in `submit` without waiting for the device, and waits in `collect`.

    Args:
        program: the work of a step on the device.
        runner: runs the program; None launches all kernels for each step, without padding.
        depth: most steps in flight.
        host_sizes: blocks of swap space in host memory, for each cache group.
        grammar: returns the grammar of a request's output, by its id, before the first token.
        score_head: as of `Sequences`.
    """

    drops_rows = False
    """A step's kernels are all launched before the first has run."""

    def __init__(
        self,
        program: StepProgram,
        device: Device,
        runner: Runner | None = None,
        *,
        depth: int = 1,
        host_sizes: Sequence[int] | None = None,
        grammar: Callable[[str], Grammar] | None = None,
        score_head: torch.Tensor | None = None,
    ) -> None:
        self.depth = depth
        self._program = program
        self._runner = runner or program
        self._device = device
        sizes = [0] * len(program.blocks) if host_sizes is None else host_sizes
        self._host_cache = GpuHostCache(device, program.blocks, sizes)
        self._sequences = Sequences(grammar, score_head)
        self._loader = StepLoader(program, device, depth=depth)
        self._flights: deque[_Flight] = deque()

    def move(self, moves: Sequence[BlockMove]) -> None:
        self._host_cache.move(moves)

    def submit(self, plan: StepPlan) -> None:
        begun = self._device.event()
        begun.record()  # passed once the step before is done, or at once
        with raising_memory_error(), torch.inference_mode():
            self._loader.forget(plan.ended_requests)
            step = self._sequences.begin(plan)
            self._flights.append(self._launch(step, begun))

    def collect(self) -> StepResult:
        flight = self._flights.popleft()
        try:
            with raising_memory_error():
                flight.done.wait()
            sampled = flight.sampled.numpy()
            check_sampled(sampled)
        except Exception:
            self._flights.clear()  # later steps were computed from its missing results
            raise
        outcome = StepOutcome(
            _by_request(flight.step, sampled.tolist()),
            _entries(flight.logprobs),
            _prompt_scores(flight.prompt_logprobs),
            flight.num_known_rows,
            {name: total.numpy() for name, total in flight.pooled_sums.items()},
        )
        seconds = flight.done.seconds_since(flight.begun)
        return self._sequences.end(flight.step, outcome, seconds)

    def _launch(self, step: BegunStep, begun: Event) -> _Flight:
        size, first_rows = self._forward(step)
        prompt_logprobs = self._score_prompts(step, first_rows.tolist())
        pooled_sums = self._pool(step, first_rows.tolist())
        known = self._sequences.num_known_rows(step)  # masks were made in the meantime
        self._sample(step, size, known)
        logprobs = self._score_sampled(step)
        sampled = self._device.download(self._program.sampled[: step.num_samples])
        done = self._device.event()
        done.record()
        return _Flight(step, known, sampled, logprobs, prompt_logprobs, pooled_sums, begun, done)

    def _forward(self, step: BegunStep) -> tuple[StepSize, Int64s]:
        """Run the layers; return the step's size and the row of each chunk's first token."""
        loaded, first_rows = self._loader.load(step, self._runner)
        self._runner.forward(loaded)
        return loaded.size, first_rows

    def _logits_of(self, rows: Int32s) -> torch.Tensor:
        """Return the logits of rows of the last launched step: [rows, V] float32."""
        return self._program.model.compute_logits(self._hidden_of(rows))

    def _hidden_of(self, rows: Int32s) -> torch.Tensor:
        """Return the hidden states of rows of the last launched step: [rows, E]."""
        return self._program.model.hidden_of(self._device.upload(rows), self._program.residual)

    def _pool(self, step: BegunStep, first_rows: Sequence[int]) -> dict[str, torch.Tensor]:
        """Start copying sums of hidden states of pooled requests to the host; key request id."""
        sums: dict[str, torch.Tensor] = {}
        for (chunk, sequence), first in zip(step.pairs, first_rows, strict=True):
            if sequence.pooled is None:
                continue
            if positions := sequence.pooled.positions(chunk):
                rows = np.arange(positions.start, positions.stop) - chunk.start + first
                total = self._hidden_of(rows.astype(np.int32)).sum(0, dtype=torch.float64)
                sums[chunk.request_id] = self._device.download(total)
        return sums

    def _sample(self, step: BegunStep, size: StepSize, num_known_rows: Mapping[str, int]) -> None:
        if not any(s.may_adjust_logits for chunk, s in step.pairs if chunk.num_samples):
            self._runner.sample(size)
            return
        sampled = sampled_rows(step, num_known_rows)
        rows = [_AS_IT_IS] * step.num_samples  # tokens of rows that are left out are not read
        for place, row in zip(sampled.places, sampled.rows, strict=True):
            rows[place] = row
        if not any(map(asks_for_change, rows)):  # no longer, as after `min_tokens`
            self._runner.sample(size)
            return
        self._program.sample(size, adjusted=self._program.adjusted(size.num_samples, rows))

    def _score_sampled(self, step: BegunStep) -> list[_Scored]:
        """Score the sampled tokens of all requests that asked for log probabilities.

        They are scored at once, except that requests which list tokens are apart.
        """
        asked: dict[tuple[int, ...] | None, list[tuple[int, str, int]]] = {}
        for (chunk, sequence), places in zip(step.pairs, _sample_places(step), strict=True):
            params = sequence.message.params
            if (num_top := params.num_shown_logprobs) is not None:
                rows = asked.setdefault(params.logprob_token_ids, [])
                rows += [(place, chunk.request_id, num_top) for place in places]
        return [self._score_rows(listed, rows) for listed, rows in asked.items() if rows]

    def _score_rows(
        self, listed: tuple[int, ...] | None, asked: Sequence[tuple[int, str, int]]
    ) -> _Scored:
        places, request_ids, num_top = map(list, zip(*asked, strict=True))
        upload = self._device.upload
        scores = self._program.scores(
            upload(np.array(places, dtype=np.int64)),
            max(num_top),
            None if listed is None else upload(np.array(listed, dtype=np.int64)),
        )
        return _Scored(request_ids, self._downloaded(scores), num_top)

    def _score_prompts(
        self, step: BegunStep, first_rows: Sequence[int]
    ) -> list[tuple[str, Scores]]:
        """Score the prompts of requests that asked for it, a few rows at a time."""
        scored: list[tuple[str, Scores]] = []
        for (chunk, sequence), first in zip(step.pairs, first_rows, strict=True):
            positions = scored_prompt(chunk, sequence)
            num_top = sequence.message.params.prompt_logprobs or 0
            for start in range(positions.start, positions.stop, LOGITS_ROWS):
                some = np.arange(start, min(start + LOGITS_ROWS, positions.stop))
                tokens = self._device.upload(sequence.token_ids[some + 1])
                logits = self._logits_of((some - chunk.start + first).astype(np.int32))
                scores = self._downloaded(score(logits, tokens, num_top))
                scored.append((chunk.request_id, scores))
        return scored

    def _downloaded(self, scores: Scores) -> Scores:
        """Start copying scores to the host."""
        return Scores._make(map(self._device.download, scores))


def _sample_places(step: BegunStep) -> list[range]:
    """Return the indices of each chunk's rows among the step's sampled rows."""
    bounds = accumulate((chunk.num_samples for chunk in step.plan.chunks), initial=0)
    return [range(first, end) for first, end in pairwise(bounds)]


def _by_request(step: BegunStep, tokens: Sequence[int]) -> dict[str, Sequence[int]]:
    return {
        chunk.request_id: tokens[places.start : places.stop]
        for chunk, places in zip(step.plan.chunks, _sample_places(step), strict=True)
    }


def _entries(scored: Sequence[_Scored]) -> dict[str, list[TokenLogprobs]]:
    entries: dict[str, list[TokenLogprobs]] = {}
    for some in scored:
        found = some.scores.entries(some.num_top)
        for request_id, entry in zip(some.request_ids, found, strict=True):
            entries.setdefault(request_id, []).append(entry)
    return entries


def _prompt_scores(scored: Sequence[tuple[str, Scores]]) -> dict[str, TokenScores]:
    parts: dict[str, list[TokenScores]] = {}
    for request_id, scores in scored:
        parts.setdefault(request_id, []).append(scores.packed())
    return {request_id: TokenScores.joined(several) for request_id, several in parts.items()}
