"""What the engine did, as data: for whoever traces it, shows it or learns from it.

All times are seconds on the clock of `AddRequest.arrival_time_s`, which is `time.monotonic`, or the
simulator's virtual one. Request ids are the engine's: those of `AddRequest`.
"""

from typing import Literal

import msgspec

from legato.core.outputs import FinishReason
from legato.core.tenant import DEFAULT_TENANT

ChunkKind = Literal["decode", "prefill", "verify"]
"""What a chunk is: the next token of a running stream; part of what must be computed before a
request is one; or a stream's next token with drafts of those behind it."""

EndedBy = Literal["prompt_end", "token_budget", "time_budget", "memory", "turn"]
"""Why a prefill chunk has no more tokens: it reaches the request's last token; the step may hold no
more tokens, or may not take longer; memory ran out in longer ones; a best-effort request had its
turn in the step."""

Obstacle = Literal["budget", "max_num_seqs", "memory", "pace", "tenants"]
"""What kept the first waiting request out of a step: its budget was spent; as many run as may; its
prompt's blocks are not free; beside it, streams would not get their tokens in time; what is left is
kept for other tenants."""


DrafterName = Literal["own", "recent", "model"]
"""Who drafts: an index over the request's own tokens, or over recent outputs of its tenant; a draft
model."""

DraftsEndedBy = Literal["proposals", "worth", "time_budget", "token_budget", "memory"]
"""Why a step holds no more drafts: nothing more was proposed; the next were not worth their time;
the step may take no longer, or hold no more tokens; there were no blocks for them."""


class ChunkRecord(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, start + num_tokens) of one request; the rest as in `ScheduledChunk`.

    Attributes:
        num_accepted: of its drafts, those that were right.
    """

    request_id: str
    start: int
    num_tokens: int
    num_samples: int
    kind: ChunkKind
    ended_by: EndedBy | None
    drafter: DrafterName | None = None
    num_accepted: int = 0

    @property
    def num_drafts(self) -> int:
        """Its last tokens that are guesses."""
        return self.num_samples - 1 if self.kind == "verify" else 0


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    """One step, as it was planned and as it went.

    Attributes:
        planned_s, started_s, ended_s: when planning began, when the executor got the plan, and when
            its result was there. With more than one step in flight, a step is planned and handed
            over while the one before it is computed.
        seconds: how long the executor took for it.
        received_s: when the front end had it; set there.
        predicted_s: what the step-time model expected of `seconds`; None as long as it knows
            nothing.
        limit_s: how long the step might take; None where nothing was due.
        budget_tokens: how many tokens it might hold.
        admitted: requests that came to run; key request id, value those of its tokens that were
            computed already.
        preempted: requests that lost their blocks.
        drafts_ended_by: why there are no more drafts; None where none were asked for.
        drafting_s: how long a draft model was asked for them, before `started_s`.
        drafts_s: of `predicted_s`, how much its drafts add; None where that is None.
        held_by: what kept the first waiting request out; None where none waited, or none was
            looked at.
        failed: requests whose chunk could not be computed.
        ran_out_of_memory: whether it was too large as it was planned.
        num_running, num_waiting: requests, after it was planned.
        num_used_blocks: of the KV cache, with the tokens of this step.
        num_cached_blocks: kept for later requests, of those that are not in use.
        replica_id: of a fleet, whose step it is; steps of each are numbered by themselves.
    """

    step_id: int
    planned_s: float
    started_s: float
    ended_s: float
    seconds: float
    received_s: float | None = None
    predicted_s: float | None
    limit_s: float | None
    budget_tokens: int
    chunks: tuple[ChunkRecord, ...]
    admitted: dict[str, int]
    preempted: tuple[str, ...]
    held_by: Obstacle | None
    failed: tuple[str, ...]
    ran_out_of_memory: bool
    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    drafts_ended_by: DraftsEndedBy | None = None
    drafting_s: float = 0.0
    drafts_s: float | None = None
    replica_id: str = ""

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts, and of what was preempted."""
        return sum(chunk.num_tokens for chunk in self.chunks if chunk.kind == "prefill")

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of running streams: the next of each, and drafts of those behind it."""
        return sum(chunk.num_tokens for chunk in self.chunks if chunk.kind != "prefill")

    @property
    def num_draft_tokens(self) -> int:
        """Those of them that are drafts."""
        return sum(chunk.num_drafts for chunk in self.chunks)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that were right."""
        return sum(chunk.num_accepted for chunk in self.chunks)

    @property
    def drafts_share(self) -> float | None:
        """Of the time it takes, what its drafts are expected to; None where that is not known."""
        if self.predicted_s is None or self.drafts_s is None:
            return None
        return (self.drafting_s + self.drafts_s) / (self.drafting_s + self.predicted_s)

    @property
    def went_as_planned(self) -> bool:
        """Whether all of it was computed; only then can `seconds` be held against `predicted_s`."""
        return not (self.failed or self.ran_out_of_memory)


class RequestArrived(msgspec.Struct, frozen=True, kw_only=True, tag="arrived", tag_field="kind"):
    """A request has come to the engine, which may refuse it at once.

    Attributes:
        arrived_s: when the front end sent it.
        taken_s: when the engine had it: the step during which it came ends first.
        is_rerun: as in `AddRequest`.
        replica_id: of a fleet, to which it has come; another, where that refuses it or dies.
    """

    request_id: str
    arrived_s: float
    taken_s: float
    num_prompt_tokens: int
    max_tokens: int | None
    slo_class: str
    priority: int
    is_rerun: bool
    tenant: str = DEFAULT_TENANT
    replica_id: str = ""


class RequestEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended", tag_field="kind"):
    """A request has left the engine.

    Attributes:
        num_output_tokens: that were sampled for it while records were made.
        num_cached_tokens: prompt tokens that were not computed for it.
        error: as in `RequestOutput`.
    """

    request_id: str
    ended_s: float
    finish_reason: FinishReason
    num_output_tokens: int
    num_cached_tokens: int
    error: str | None


class GrammarReady(msgspec.Struct, frozen=True, kw_only=True, tag="grammar", tag_field="kind"):
    """A request has the grammar of its output, and has come to the scheduler with it.

    Attributes:
        ready_s: when the step that ran when it was compiled had ended.
        compile_s: how long compiling took, next to nothing where it was kept of an earlier request.
    """

    request_id: str
    ready_s: float
    compile_s: float


class BlocksFetched(msgspec.Struct, frozen=True, kw_only=True, tag="fetched", tag_field="kind"):
    """A request has those blocks of its prompt that come from another engine.

    Attributes:
        begun_s, ended_s: when it was admitted and they were asked for, and when the last was there,
            or nothing more was to come.
        num_tokens: that came.
        num_wanted_tokens: that were asked for; what did not come is computed here.
    """

    request_id: str
    begun_s: float
    ended_s: float
    num_tokens: int
    num_wanted_tokens: int


EngineRecord = StepRecord | RequestArrived | GrammarReady | BlocksFetched | RequestEnded


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True, tag="answer", tag_field="kind"):
    """How the answer to one HTTP request went, from its first byte in to its last byte out.

    Attributes:
        http_id: what the client has as `X-Request-Id`.
        answer_id: what stands behind the prefix of the answer's `id`.
        operation: "chat", "responses", "messages" or "text_completion".
        request_ids: of its completions, as far as anything came of them; key the choice's index.
        received_s: when its first bytes came.
        ended_s: when its end had been written; where it is not streamed, when all of it had come.
        sent_s: when what came with each token had gone to the client's socket; where the answer is
            not streamed, when the token came. Key the choice's index.
        finish_reasons: of the completions as the client sees them; key the choice's index.
        error, error_type: why there is no answer, or none to the end; its message and its kind.
        num_prompt_tokens, num_output_tokens: of all of its prompts and completions.
        n, max_tokens, temperature, top_p: as asked for.
        trace_context: headers of W3C's trace context that came with it; key the header's name.
    """

    http_id: str
    answer_id: str
    operation: str
    is_streamed: bool
    request_ids: dict[int, str]
    received_s: float
    ended_s: float
    sent_s: dict[int, list[float]]
    finish_reasons: dict[int, FinishReason]
    error: str | None
    error_type: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    n: int
    max_tokens: int | None
    temperature: float
    top_p: float
    trace_context: dict[str, str]


Record = EngineRecord | AnswerRecord


class StepBegun(msgspec.Struct, frozen=True, kw_only=True, tag="begun", tag_field="kind"):
    """A step is about to be computed; its `StepRecord` comes when it was.

    Attributes:
        planned_s, predicted_s, limit_s, budget_tokens: as in `StepRecord`.
        num_decode_tokens, replica_id: as there.
        prefill_tokens: of prompts, and of what was preempted; key request id.
    """

    step_id: int
    planned_s: float
    predicted_s: float | None
    limit_s: float | None
    budget_tokens: int
    num_decode_tokens: int
    prefill_tokens: dict[str, int]
    replica_id: str = ""


class RequestSent(msgspec.Struct, frozen=True, kw_only=True, tag="sent", tag_field="kind"):
    """A request was sent to the engine, which takes it when the step that runs has ended.

    Attributes:
        arrived_s, num_prompt_tokens, slo_class: as in `RequestArrived`.
    """

    request_id: str
    arrived_s: float
    num_prompt_tokens: int
    slo_class: str


LiveRecord = StepBegun | RequestSent
"""What is told before it is over: for who watches, and in no trace."""


def received(record: EngineRecord, now_s: float) -> EngineRecord:
    """The record, with the time at which the front end had it where it is a step's."""
    if isinstance(record, StepRecord):
        return msgspec.structs.replace(record, received_s=now_s)
    return record
