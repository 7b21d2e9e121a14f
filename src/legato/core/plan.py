"""The plan of one step, and its result."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from legato.core.outputs import TokenLogprobs, TokenScores
from legato.core.request import AddRequest
from legato.core.step_record import (
    ChunkKind,
    DrafterName,
    DraftsEndedBy,
    EndedBy,
    Obstacle,
    ShortHit,
)

ZERO_STATE, SCRATCH_STATE, FIRST_STATE = 0, 1, 2
"""State slots: zeros, which no step writes, for a request's first chunk; a slot that steps outside
any request write to; and the first slot of requests."""


class StateChange(NamedTuple):
    """The state slots of a chunk: the step reads one and writes others.

    The slot that it reads is unchanged if the step fails.

    Attributes:
        destination: of the state after the chunk.
        earlier: of the state after each row but the last, for a chunk with drafts; otherwise empty.
    """

    source: int
    destination: int
    earlier: tuple[int, ...] = ()


class GivenTokens(NamedTuple):
    """Tokens of an output that were not sampled, and replace what was sampled in their place.

    Attributes:
        start: position of the first of them.
    """

    start: int
    token_ids: tuple[int, ...]


class ScheduledChunk(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, start + num_tokens) of one request, computed in one step.

    Attributes:
        block_ids: the request's block table up to at least `start + num_tokens` tokens. The same
            object is the same table.
        num_samples: how many of the chunk's last rows are sampled: 0 inside a prompt and for a
            pooled request, 1 if the chunk reaches the request's last token, and 1 more for each
            draft.
        kind: kind of chunk, for the step-time model, metrics and traces alike.
        ended_by: why a prefill chunk is not longer; None for other kinds.
        draft_token_ids: drafts, the chunk's last tokens; the tokens before them are known, or come
            with a step in flight.
        drafter: source of the drafts; None without drafts.
        state: slots of the recurrent layers' states; None if the model has no such layers, or for
            a chunk outside any request.
        window_block_ids: the request's block table in each window group of the cache, as long as
            `block_ids`; entries that no query of the chunk reads may be any block.
        given: the last tokens of the request, if they were given and are not computed yet. A chunk
            may repeat those of an earlier one.
    """

    request_id: str
    start: int
    num_tokens: int
    block_ids: Sequence[int]
    num_samples: int
    kind: ChunkKind
    ended_by: EndedBy | None = None
    draft_token_ids: tuple[int, ...] = ()
    drafter: DrafterName | None = None
    state: StateChange | None = None
    window_block_ids: tuple[Sequence[int], ...] = ()
    given: GivenTokens | None = None

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    def result(
        self,
        sampled: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
        prompt_logprobs: TokenScores | None = None,
    ) -> "ChunkResult":
        """Return the chunk's result from the tokens of its sampled rows, or of the first of them.

        A row after a draft is valid only if the row before it sampled that draft, so drafts never
        change the output (Leviathan et al., 2023, arXiv:2211.17192, with each row's random number
        fixed beforehand).
        """
        num_right = 0
        for draft, token_id in zip(self.draft_token_ids, sampled[:-1], strict=False):
            if draft != token_id:
                break
            num_right += 1
        num_kept = num_right + 1 if sampled else 0
        return ChunkResult(
            self.num_tokens - len(self.draft_token_ids) + num_right,
            tuple(sampled[:num_kept]),
            None if logprobs is None else tuple(logprobs[:num_kept]),
            prompt_logprobs,
        )

    @property
    def without_drafts(self) -> "ScheduledChunk":
        """The chunk without its drafts."""
        num_drafts = len(self.draft_token_ids)
        return ScheduledChunk(
            self.request_id,
            self.start,
            self.num_tokens - num_drafts,
            self.block_ids,
            self.num_samples - num_drafts,
            "decode",
            state=self.state and StateChange(self.state.source, self.state.earlier[0]),
            window_block_ids=self.window_block_ids,
            given=self.given,
        )

    def first_rows(self, num_rows: int) -> "ScheduledChunk":
        """Return a prefill chunk without the rows after the first ones, which sample nothing."""
        if num_rows == self.num_tokens:
            return self
        assert self.kind == "prefill", "a stream's next token is never dropped"
        return msgspec.structs.replace(
            self, num_tokens=num_rows, num_samples=0, ended_by="deadline"
        )

    def unsampled(
        self, prompt_logprobs: TokenScores | None = None, *, is_complete: bool = False
    ) -> "ChunkResult":
        """Return the chunk's result without samples: rows to sample are computed again."""
        return ChunkResult(
            self.num_tokens - self.num_samples,
            prompt_logprobs=prompt_logprobs,
            is_complete=is_complete,
        )


class Deadline(msgspec.Struct, frozen=True, gc=False):
    """Until when a step must be computed for its streams' tokens to be in time.

    To keep it, the executor drops the last rows of the step's last chunks, which must be prefill,
    from some layer on. By causality no other row depends on them.

    Attributes:
        layers_s: seconds from the step's submission to the end of its layers.
        late_s: the same to the end after which a token is late.
        prefill_share: share of the step's time that its prefill rows are expected to take.
    """

    layers_s: float
    late_s: float
    prefill_share: float


class RowCut(NamedTuple):
    """A drop of a step's last rows.

    Attributes:
        done: share of the layers that had been computed, in (0, 1).
        num_rows: rows that the other layers computed.
    """

    done: float
    num_rows: int


STATES = -1
"""The `BlockMove.group` of states."""


class BlockMove(msgspec.Struct, frozen=True, gc=False):
    """A copy of a block to or from a slot of host memory.

    Attributes:
        block_id: the block, or a state slot.
        group: index of the cache group that block and slot belong to; `STATES` for states.
    """

    block_id: int
    slot: int
    to_host: bool
    group: int = 0


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One packed forward pass.

    Attributes:
        new_requests: requests the executor has not seen before; each has a chunk in this plan.
        ended_requests: ids of requests whose state the executor may drop before this step.
        preempted: ids of requests that gave up their blocks so that this step fits.
        moves: copies to be made, in this order and once, before the step.
        admitted, short_hits, held_by, drafts_ended_by: as in `StepRecord`.
        drafting_s, drafts_s: likewise; how long drafts took to make, and are expected to take.
        predicted_s, limit_s, budget_tokens: likewise; expected duration and limits of the step.
            With steps in flight, the step begins at the predicted end of the last one.
        deadline: None if all rows must be computed.
    """

    step_id: int
    chunks: tuple[ScheduledChunk, ...]
    new_requests: tuple[AddRequest, ...] = ()
    ended_requests: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    moves: tuple[BlockMove, ...] = ()
    admitted: dict[str, int] = msgspec.field(default_factory=dict)
    short_hits: dict[str, ShortHit] = msgspec.field(default_factory=dict)
    held_by: Obstacle | None = None
    drafts_ended_by: DraftsEndedBy | None = None
    drafting_s: float = 0.0
    drafts_s: float | None = None
    predicted_s: float | None = None
    limit_s: float | None = None
    budget_tokens: int = 0
    deadline: Deadline | None = None

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    def part(self, chunks: Sequence[ScheduledChunk]) -> "StepPlan":
        """Return the step with only some of its chunks, and their new requests.

        It has no moves: these copies have been made. It has no deadline: time has passed.
        """
        ids = {chunk.request_id for chunk in chunks}
        new = tuple(request for request in self.new_requests if request.request_id in ids)
        return msgspec.structs.replace(
            self, chunks=tuple(chunks), new_requests=new, moves=(), deadline=None
        )

    def first_rows(self, num_rows: int) -> "StepPlan":
        """Return the step with only the first rows of its chunks; the rest is prefill."""
        chunks: list[ScheduledChunk] = []
        for chunk in self.chunks:
            if num_rows <= 0:
                break
            chunks.append(chunk.first_rows(min(num_rows, chunk.num_tokens)))
            num_rows -= chunk.num_tokens
        return msgspec.structs.replace(self, chunks=tuple(chunks))


class Fault(msgspec.Struct, frozen=True):
    """Why a request cannot go on.

    It keeps the text of a step's exception; the exception would keep the step's memory alive.

    Attributes:
        is_asked_for: the fault follows from the request's own settings, on any engine.
        is_device_lost: the device computes nothing for this process any more.
    """

    error: str
    is_out_of_memory: bool = False
    is_asked_for: bool = False
    is_device_lost: bool = False


class ChunkResult(msgspec.Struct, frozen=True, gc=False):
    """The result of one chunk.

    Attributes:
        num_tokens: how many of the chunk's tokens count, from its start on: all of them except
            wrong drafts and dropped rows.
        token_ids: tokens sampled after the counted ones: none inside a prompt, one at a request's
            last token, and one more for each right draft. There is none, either, if the step could
            not wait to learn which tokens are allowed: then the last token does not count, and is
            computed again.
        logprobs: one entry for each of `token_ids`; None if not asked for.
        prompt_logprobs: scores of the prompt tokens at [start + 1, min(end + 1, prompt length)),
            none of them twice; None if not asked for.
        is_complete: whether the output's grammar allows no further token.
        pooled: float32 [E], the vector of a pooled request that the chunk completes.
        num_dropped: its last rows that were dropped to keep the step's deadline. What they wrote
            to the cache is written again.
    """

    num_tokens: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: TokenScores | None = None
    is_complete: bool = False
    pooled: bytes | None = None
    num_dropped: int = 0

    def cut(self, num_samples: int, *, is_complete: bool) -> "ChunkResult":
        """Return the result with at most `num_samples` tokens; the last may end the output."""
        num_left_out = max(0, len(self.token_ids) - num_samples)
        return ChunkResult(
            self.num_tokens - num_left_out,
            self.token_ids[:num_samples],
            None if self.logprobs is None else self.logprobs[:num_samples],
            self.prompt_logprobs,
            is_complete,
        )


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one step. It decides how far each request has come.

    Attributes:
        seconds: how long the executor took, by its own clock.
        chunks: key request id, for chunks that were computed.
        faults: key request id, for chunks that could not be computed even alone, and for chunks of
            requests whose settings forbid every possible next token.
        ran_out_of_memory: whether the planned step was too large.
        cuts: in order, how rows were dropped to keep the plan's deadline.
        foreseen_s: when the layers were expected to end, as of the executor's last look at the
            clock, in seconds from the step's submission; None if it looked too early to tell, or
            not at all.
    """

    step_id: int
    seconds: float
    chunks: dict[str, ChunkResult] = msgspec.field(default_factory=dict)
    faults: dict[str, Fault] = msgspec.field(default_factory=dict)
    ran_out_of_memory: bool = False
    cuts: tuple[RowCut, ...] = ()
    foreseen_s: float | None = None
