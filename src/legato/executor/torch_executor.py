"""Runs step plans on a PyTorch model."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from legato.core.outputs import TokenLogprobs, TokenScores
from legato.core.plan import BlockMove, StepPlan, StepResult
from legato.executor.attention.attention_backend import AttentionBackend
from legato.executor.batch import PackedBatch, pack
from legato.executor.cache_memory import raising_memory_error
from legato.executor.deadline import MIN_LAYERS, DeadlineWatch, with_dropped
from legato.executor.host_cache import HostCache
from legato.executor.logprobs import Scores, compute_logprobs, score
from legato.executor.pooling import Float64s
from legato.executor.sampler import NO_TOKEN, sample
from legato.executor.sequences import (
    BegunStep,
    SampledRows,
    Sequences,
    StepOutcome,
    sampled_rows,
    scored_prompt,
)
from legato.executor.state_cache import StateCache
from legato.grammar.matcher import Grammar
from legato.model.model import Model
from legato.model.states import StepStates

LOGITS_ROWS = 128
"""Rows of prompt logits in memory at once: [128, V] float32."""


class TorchExecutor:
    """Runs one packed forward pass a step and samples its rows, all in `submit`.

    Args:
        host_cache: swap space in host memory; None if there is none.
        grammar: returns the grammar of a request's output, by its id, before the first token.
        states: of the recurrent layers; None if the model has none.
        score_head: as of `Sequences`.
        clock: returns seconds; steps are measured by it, and keep their deadlines by it.
    """

    depth = 1

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        block_size: int,
        *,
        host_cache: HostCache | None = None,
        grammar: Callable[[str], Grammar] | None = None,
        states: StateCache | None = None,
        score_head: torch.Tensor | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drops_rows = model.drops_rows and model.cache.num_layers >= MIN_LAYERS
        self._clock = clock
        self._model = model
        self._states = states
        self._attention = attention
        self._block_size = block_size
        self._sequences = Sequences(grammar, score_head)
        self._result: StepResult | None = None
        self._host_cache = host_cache or HostCache()

    def move(self, moves: Sequence[BlockMove]) -> None:
        self._host_cache.move(moves)

    def submit(self, plan: StepPlan) -> None:
        started_s = self._clock()
        with (
            raising_memory_error(),
            torch.inference_mode(),
            torch_threads(self._model.num_torch_threads),
        ):
            step = self._sequences.begin(plan)
            batch = pack(
                plan.chunks,
                step.sequences,
                block_size=self._block_size,
                device=self._model.device,
                padding=self._model.rows,
            )
            watch: DeadlineWatch | None = None
            if plan.deadline is not None:
                watch = DeadlineWatch(
                    plan, batch, self._attention, self._model.rows, self._clock, started_s
                )
            hidden = self._forward(plan, batch, watch)
            if watch is not None and watch.cuts:
                step, batch = step.first_rows(watch.num_rows), watch.batch
            outcome = self._end(step, batch, hidden)
        result = self._sequences.end(step, outcome, self._clock() - started_s)
        self._result = result if watch is None else with_dropped(result, plan, watch)

    def collect(self) -> StepResult:
        result, self._result = self._result, None
        assert result is not None, "nothing was submitted"
        return result

    def _forward(
        self, plan: StepPlan, batch: PackedBatch, watch: DeadlineWatch | None
    ) -> torch.Tensor:
        """Run the layers; the hidden states are of fewer rows if the watch dropped any."""
        attention = self._attention.begin_step(batch)
        states: StepStates | None = None
        if self._states is not None:
            states = self._states.begin_step(batch, [chunk.state for chunk in plan.chunks])
        return self._model.forward(
            batch.input_ids, batch.positions, attention, states=states, watch=watch
        )

    def _end(self, step: BegunStep, batch: PackedBatch, hidden: torch.Tensor) -> StepOutcome:
        prompt_logprobs = self._score_prompts(step, batch, hidden)
        pooled_sums = _pool(step, batch, hidden)
        known = self._sequences.num_known_rows(step)
        token_ids, logprobs = self._sample(step, batch, hidden, known)
        return StepOutcome(token_ids, logprobs, prompt_logprobs, known, pooled_sums)

    def _score_prompts(
        self, step: BegunStep, batch: PackedBatch, hidden: torch.Tensor
    ) -> dict[str, TokenScores]:
        """Return prompt log probabilities; key request id, of requests that asked for them."""
        scores: dict[str, TokenScores] = {}
        for (chunk, sequence), row in zip(step.pairs, batch.query_start.tolist(), strict=False):
            scored = scored_prompt(chunk, sequence)
            if not scored:
                continue
            first = row - chunk.start
            rows = hidden[first + scored.start : first + scored.stop]
            tokens = torch.from_numpy(sequence.token_ids[scored.start + 1 : scored.stop + 1])
            num_top = sequence.message.params.prompt_logprobs or 0
            scores[chunk.request_id] = self._scores(rows, tokens.to(hidden.device), num_top)
        return scores

    def _scores(self, hidden: torch.Tensor, tokens: torch.Tensor, num_top: int) -> TokenScores:
        """Score `tokens` [N], each after its row of [N, E], a few rows at a time."""
        parts: list[TokenScores] = []
        for rows, chosen in zip(
            torch.split(hidden, LOGITS_ROWS), torch.split(tokens, LOGITS_ROWS), strict=True
        ):
            logits = self._model.compute_logits(rows)
            parts.append(Scores._make(x.cpu() for x in score(logits, chosen, num_top)).packed())
        return TokenScores.joined(parts)

    def _sample(
        self,
        step: BegunStep,
        batch: PackedBatch,
        hidden: torch.Tensor,
        num_known_rows: Mapping[str, int],
    ) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprobs]]]:
        """Sample a token for each row, and log probabilities on request; key request id."""
        sampled = sampled_rows(step, num_known_rows)
        if not sampled.rows:
            return {}, {}
        num_rows = step.num_samples
        logits = self._model.compute_logits(hidden[batch.sample_rows])[:num_rows]  # [S, V]
        if len(sampled.places) < num_rows:
            logits = logits[torch.tensor(sampled.places, device=logits.device)]
        tokens = sample(logits, sampled.rows)
        return sampled.grouped(tokens.tolist()), _sample_logprobs(sampled, logits, tokens)


def _pool(step: BegunStep, batch: PackedBatch, hidden: torch.Tensor) -> dict[str, Float64s]:
    """Sum hidden states of pooled requests; key request id."""
    sums: dict[str, Float64s] = {}
    for (chunk, sequence), row in zip(step.pairs, batch.query_start.tolist(), strict=False):
        if sequence.pooled is None:
            continue
        if positions := sequence.pooled.positions(chunk):
            first = row - chunk.start
            rows = hidden[first + positions.start : first + positions.stop]
            sums[chunk.request_id] = rows.sum(0, dtype=torch.float64).cpu().numpy()
    return sums


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Set PyTorch's thread count for the block; None leaves it unchanged."""
    usual = torch.get_num_threads()
    torch.set_num_threads(count or usual)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def _sample_logprobs(
    sampled: SampledRows, logits: torch.Tensor, tokens: torch.Tensor
) -> dict[str, list[TokenLogprobs]]:
    ids = tokens.tolist()
    asking = [i for i in sampled.scored if ids[i] != NO_TOKEN]
    if not asking:
        return {}
    scored = sampled.part(asking)
    index = torch.tensor(asking, device=logits.device)
    asked = [row.params for row in scored.rows]
    num_top = [0 if params.logprob_token_ids else params.logprobs or 0 for params in asked]
    logits, tokens = logits[index], tokens[index]
    entries = compute_logprobs(logits, tokens, num_top)
    for i, params in enumerate(asked):
        if params.logprob_token_ids:
            listed = torch.tensor(params.logprob_token_ids, device=logits.device)
            of_row = score(logits[i : i + 1], tokens[i : i + 1], 0, listed)
            entries[i : i + 1] = of_row.entries([params.num_shown_logprobs or 0])
    return scored.grouped(entries)
