"""The requests that an executor knows, and the results of their steps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import torch

from legato.core.outputs import TokenLogprobs, TokenScores
from legato.core.plan import ChunkResult, Fault, GivenTokens, ScheduledChunk, StepPlan, StepResult
from legato.core.request import AddRequest
from legato.executor.constraint import Constraint
from legato.executor.mask_maker import MaskMaker
from legato.executor.pooling import Float64s
from legato.executor.sampler import NO_TOKEN
from legato.executor.sequence import SamplingRow, SequenceState
from legato.grammar.matcher import Grammar

_Value = TypeVar("_Value")

_ALL_FORBIDDEN = Fault(
    "the request's own settings forbid every token that could come next", is_asked_for=True
)
_MASK_WAIT_S = 0.002
"""Longest wait for masks in a step with chunks that need none, in seconds."""


@dataclass(frozen=True)
class BegunStep:
    """A plan and the sequences of its chunks, which may have ended meanwhile.

    Attributes:
        sequences: one for each chunk, in the chunks' order.
    """

    plan: StepPlan
    sequences: Sequence[SequenceState]

    @property
    def pairs(self) -> Iterable[tuple[ScheduledChunk, SequenceState]]:
        return zip(self.plan.chunks, self.sequences, strict=True)

    @property
    def num_samples(self) -> int:
        return sum(chunk.num_samples for chunk in self.plan.chunks)

    def first_rows(self, num_rows: int) -> "BegunStep":
        """Return the step with only the first rows of its chunks."""
        plan = self.plan.first_rows(num_rows)
        return BegunStep(plan, self.sequences[: len(plan.chunks)])


@dataclass(frozen=True)
class SampledRows:
    """The S sampled rows of a step.

    Attributes:
        request_ids: the request of each row.
        places: index of each among all rows that the plan samples; some may be left out.
    """

    request_ids: Sequence[str]
    rows: Sequence[SamplingRow]
    places: Sequence[int]

    def grouped(self, values: Iterable[_Value]) -> dict[str, list[_Value]]:
        """Group S values by request; key request id."""
        groups: dict[str, list[_Value]] = {}
        for request_id, value in zip(self.request_ids, values, strict=True):
            groups.setdefault(request_id, []).append(value)
        return groups

    def part(self, indices: Sequence[int]) -> "SampledRows":
        """Return the rows at these indices."""
        return SampledRows(
            [self.request_ids[i] for i in indices],
            [self.rows[i] for i in indices],
            [self.places[i] for i in indices],
        )

    @property
    def scored(self) -> list[int]:
        """Indices of rows with log probabilities requested."""
        return [i for i, row in enumerate(self.rows) if row.params.logprobs is not None]


@dataclass(frozen=True)
class StepOutcome:
    """The results of a step; key request id everywhere.

    Attributes:
        token_ids: one for each sampled row.
        logprobs, prompt_logprobs: of requests that asked for them.
        pooled_sums: sums of hidden states, of pooled requests, as `PooledPrompt.add` takes them.
        num_known_rows: as `Sequences.num_known_rows` returned.
    """

    token_ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, TokenScores] = field(default_factory=dict)
    num_known_rows: Mapping[str, int] = field(default_factory=dict)
    pooled_sums: Mapping[str, Float64s] = field(default_factory=dict)

    def of(self, chunk: ScheduledChunk, constraint: Constraint | None) -> ChunkResult:
        name = chunk.request_id
        scores = self.prompt_logprobs.get(name)
        num_known = self.num_known_rows.get(name, chunk.num_samples)
        if constraint is not None and num_known < min(1, chunk.num_samples):
            return chunk.unsampled(scores, is_complete=constraint.is_complete)
        sampled = self.token_ids.get(name, ())[:num_known]
        return chunk.result(sampled, self.logprobs.get(name), scores)


class Sequences:
    """The state of each request between steps, so that a plan names only positions and blocks.

    Args:
        grammar: returns the grammar of a request's output, by its id, before the first token.
        score_head: [labels, E], the checkpoint's classification head; None without one.
    """

    def __init__(
        self,
        grammar: Callable[[str], Grammar] | None = None,
        score_head: torch.Tensor | None = None,
    ) -> None:
        # A copy: a tensor of a file that is cut later ends the process.
        self._score_head = None if score_head is None else score_head.float().cpu().numpy().copy()
        self._sequences: dict[str, SequenceState] = {}  # key request id
        self._grammar = grammar
        self._masks = MaskMaker()

    def begin(self, plan: StepPlan) -> BegunStep:
        """Record the plan's new and ended requests, even if the step fails later."""
        for request_id in plan.ended_requests:
            # Unknown if a step failed and its parts, submitted again, list the request again.
            ended = self._sequences.pop(request_id, None)
            if ended is not None and ended.constraint is not None:
                self._masks.close(ended.constraint)
        for message in plan.new_requests:
            constraint = self._constraint(message)
            self._sequences[message.request_id] = SequenceState(
                message, constraint, self._score_head
            )
        step = BegunStep(plan, [self._sequences[chunk.request_id] for chunk in plan.chunks])
        for chunk, sequence in step.pairs:
            if chunk.given is not None:
                self._give(sequence, chunk.given)
            if chunk.draft_token_ids:
                sequence.guess(chunk.draft_token_ids, chunk.end - len(chunk.draft_token_ids))
        self._masks.want(
            [(constraint, chunk.draft_token_ids) for chunk, constraint in _constrained(step)]
        )
        return step

    def num_known_rows(self, step: BegunStep) -> dict[str, int]:
        """Return how many rows each chunk with a grammar samples; key request id.

        It does not sample the rows after them: no token may come there, or their masks are late. A
        late mask holds up only the request that needs it.
        """
        constrained = _constrained(step)
        if constrained:
            is_alone = len(constrained) == len(step.plan.chunks)
            self._masks.wait([c for _, c in constrained], _MASK_WAIT_S, is_alone=is_alone)
        return {chunk.request_id: constraint.num_known_rows for chunk, constraint in constrained}

    def end(self, step: BegunStep, outcome: StepOutcome, seconds: float) -> StepResult:
        """Commit a step's results to the sequences.

        Called once nothing can fail any more, since a step that raises must leave no trace.
        """
        chunks: dict[str, ChunkResult] = {}
        faults: dict[str, Fault] = {}
        going_on: list[Constraint] = []
        for chunk, sequence in step.pairs:
            constraint = sequence.constraint
            result = outcome.of(chunk, constraint)
            if NO_TOKEN in result.token_ids:
                num_sampled = result.token_ids.index(NO_TOKEN)
                if not num_sampled:
                    faults[chunk.request_id] = _ALL_FORBIDDEN
                    continue
                # A token before it may end the request; else the next step finds it again.
                result = result.cut(num_sampled, is_complete=False)
            sequence.num_prompt_logprobs += len(result.prompt_logprobs or ())
            if (total := outcome.pooled_sums.get(chunk.request_id)) is not None:
                assert sequence.pooled is not None, "only pooled requests have sums"
                sequence.pooled.add(chunk, total)
                result = msgspec.structs.replace(result, pooled=sequence.pooled.vector)
            if constraint is not None and result.token_ids:
                num_taken = self._masks.advance(constraint, result.token_ids)
                result = result.cut(num_taken, is_complete=constraint.is_complete)
                going_on.append(constraint)
            for token_id in result.token_ids:
                sequence.append(token_id)
            if constraint is not None and constraint.fault is not None:
                faults[chunk.request_id] = constraint.fault
            else:
                chunks[chunk.request_id] = result
        self._masks.want([(constraint, ()) for constraint in going_on])
        return StepResult(step_id=step.plan.step_id, seconds=seconds, chunks=chunks, faults=faults)

    def _give(self, sequence: SequenceState, given: GivenTokens) -> None:
        """Put given tokens in the place of sampled ones; a second time, nothing changes.

        No step is in flight that samples a token of the sequence.
        """
        num_kept = given.start - sequence.num_prompt_tokens
        if sequence.constraint is not None and sequence.given != given:
            self._masks.give(sequence.constraint, num_kept, given.token_ids)
        sequence.given, sequence.num_tokens = given, given.start
        for token_id in given.token_ids:
            sequence.append(token_id)

    def _constraint(self, message: AddRequest) -> Constraint | None:
        if message.params.structured_outputs is None:
            return None
        known = self._sequences.get(message.request_id)
        if known is not None:  # its first step failed; a job may be using the grammar
            return known.constraint
        assert self._grammar is not None, "no grammars were promised"
        ends = (*message.eos_token_ids, *message.params.stop_token_ids)
        constraint = Constraint(self._grammar(message.request_id), ends)
        self._masks.want([(constraint, ())])
        return constraint


def _constrained(step: BegunStep) -> list[tuple[ScheduledChunk, Constraint]]:
    """Return the chunks that sample tokens by a grammar."""
    return [
        (chunk, sequence.constraint)
        for chunk, sequence in step.pairs
        if chunk.num_samples and sequence.constraint is not None
    ]


def sampled_rows(step: BegunStep, num_known_rows: Mapping[str, int]) -> SampledRows:
    """Return the sampled rows of a step, in their order.

    Args:
        num_known_rows: as `Sequences.num_known_rows` returned.
    """
    ids: list[str] = []
    rows: list[SamplingRow] = []
    places: list[int] = []
    num_rows = 0
    for chunk, sequence in step.pairs:
        num_known = num_known_rows.get(chunk.request_id, chunk.num_samples)
        for i in range(min(num_known, chunk.num_samples)):
            ids.append(chunk.request_id)
            rows.append(sequence.sampling_row(chunk.end - chunk.num_samples + 1 + i))
            places.append(num_rows + i)
        num_rows += chunk.num_samples
    return SampledRows(ids, rows, places)


def scored_prompt(chunk: ScheduledChunk, sequence: SequenceState) -> range:
    """Return the positions whose rows score the next prompt token, none of them twice.

    Row p scores token p + 1. Scores of tokens [1, num_prompt_logprobs] were returned before a
    preemption.
    """
    if sequence.message.params.prompt_logprobs is None:
        return range(0)
    first = max(chunk.start, sequence.num_prompt_logprobs)
    return range(first, min(chunk.end, sequence.num_prompt_tokens - 1))
