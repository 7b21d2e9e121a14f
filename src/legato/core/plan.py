"""What one step is to compute, and what came of it."""

from collections.abc import Sequence

import msgspec

from legato.core.outputs import TokenLogprobs
from legato.core.request import AddRequest
from legato.core.step_record import EndedBy, Obstacle


class ScheduledChunk(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, start + num_tokens) of one request, computed in one step.

    Attributes:
        block_ids: the request's block table up to at least `start + num_tokens` tokens.
        num_samples: how many of the chunk's last rows are sampled: 0 inside a prompt, 1 where the
            chunk reaches the request's last token.
        ended_by: why it is no longer.
    """

    request_id: str
    start: int
    num_tokens: int
    block_ids: tuple[int, ...]
    num_samples: int
    ended_by: EndedBy = "prompt_end"

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class BlockMove(msgspec.Struct, frozen=True, gc=False):
    """A copy of a block to or from a slot of host memory."""

    block_id: int
    slot: int
    to_host: bool


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One packed forward pass.

    Attributes:
        new_requests: requests the executor has not seen before; each has a chunk in this plan.
        ended_requests: ids whose state the executor may drop before this step.
        preempted: ids that gave up their blocks for this step to fit.
        moves: copies to be made, in this order and once, before the step.
        admitted, held_by: as in `StepRecord`, as are the next.
        predicted_s, limit_s, budget_tokens: what the step may hold, and is expected to take.
    """

    step_id: int
    chunks: tuple[ScheduledChunk, ...]
    new_requests: tuple[AddRequest, ...] = ()
    ended_requests: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    moves: tuple[BlockMove, ...] = ()
    admitted: dict[str, int] = msgspec.field(default_factory=dict)
    held_by: Obstacle | None = None
    predicted_s: float | None = None
    limit_s: float | None = None
    budget_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    def part(self, chunks: Sequence[ScheduledChunk]) -> "StepPlan":
        """The same step with some of its chunks only, and the new requests among these.

        Copies between blocks and host memory have been made.
        """
        ids = {chunk.request_id for chunk in chunks}
        new = tuple(request for request in self.new_requests if request.request_id in ids)
        return msgspec.structs.replace(self, chunks=tuple(chunks), new_requests=new, moves=())


class Fault(msgspec.Struct, frozen=True):
    """What a step raised, told rather than kept: a traceback holds on to the memory of its step."""

    error: str
    is_out_of_memory: bool


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens of one step.

    Attributes:
        sampled: key request id, value the sampled token ids, for chunks with `num_samples` > 0
            that were computed.
        logprobs: key request id, value one entry a sampled token, for requests that asked.
        prompt_logprobs: key request id, value one entry a prompt token that this step's chunk
            scored: those at [start + 1, min(end + 1, prompt length)), but none twice, for requests
            that asked.
        faults: key request id, for chunks that could not be computed even alone.
        ran_out_of_memory: whether the step was too large as it was planned.
    """

    step_id: int
    sampled: dict[str, list[int]] = msgspec.field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = msgspec.field(default_factory=dict)
    faults: dict[str, Fault] = msgspec.field(default_factory=dict)
    ran_out_of_memory: bool = False
