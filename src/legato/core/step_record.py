"""Records of the engine's work, for traces, displays and learning.

All times are seconds on the clock of `AddRequest.arrival_time_s`, which is `time.monotonic`, or the
simulator's virtual one. Request ids are the engine's: those of `AddRequest`.
"""

from typing import Literal

import msgspec

from legato.core.outputs import FinishReason
from legato.core.tenant import DEFAULT_TENANT

ChunkKind = Literal["decode", "prefill", "verify"]
"""What a chunk is: the next token of a running stream; part of the tokens that must be computed
before a request is a stream; or a stream's next token followed by drafts."""

EndedBy = Literal[
    "prompt_end", "token_budget", "time_budget", "memory", "turn", "checkpoint", "deadline"
]
"""Why a prefill chunk has no more tokens: it reaches the request's last token; the step may hold no
more tokens, or may not take longer; memory ran out in longer chunks; a best-effort chunk went
before it in the step; the state of recurrent layers is kept at its end; its last rows were dropped
to keep the step's deadline."""

Lack = Literal["checkpoint", "window"]
"""What a hit lacks at the end of the cached blocks: a kept state of recurrent layers; blocks of a
sliding window."""

Obstacle = Literal["budget", "max_num_seqs", "memory", "pace", "tenants"]
"""What kept the first waiting request out of a step: the step's budget was spent; the most requests
are running; its prompt's blocks are not free; streams beside it would not get their tokens in time;
the rest is kept for other tenants."""


DrafterName = Literal["own", "recent", "model"]
"""Source of drafts: an index over the request's own tokens, or over recent outputs of its tenant; a
draft model."""

DraftsEndedBy = Literal["proposals", "worth", "time_budget", "token_budget", "memory"]
"""Why a step holds no more drafts: no more were proposed; the next were not worth their time; the
step may take no longer, or hold no more tokens; there were no blocks for them."""


class ShortHit(msgspec.Struct, frozen=True, gc=False):
    """A hit that is shorter than the cached blocks of the request's beginning.

    Attributes:
        num_tokens: tokens that need not be computed.
        num_matched_tokens: tokens in cached blocks.
        lacks: what was not kept for the tokens in between.
    """

    num_tokens: int
    num_matched_tokens: int
    lacks: Lack


class ChunkRecord(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, start + num_tokens) of one request; the rest as in `ScheduledChunk`.

    Attributes:
        num_accepted: number of its drafts that were right.
        num_dropped: number of tokens after these whose rows were dropped to keep the step's
            deadline; a later step computes them again. A chunk may have lost all its tokens.
    """

    request_id: str
    start: int
    num_tokens: int
    num_samples: int
    kind: ChunkKind
    ended_by: EndedBy | None
    drafter: DrafterName | None = None
    num_accepted: int = 0
    num_dropped: int = 0

    @property
    def num_drafts(self) -> int:
        """Number of its last tokens that are drafts."""
        return self.num_samples - 1 if self.kind == "verify" else 0


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    """One step, as planned and as executed.

    Attributes:
        planned_s, started_s, ended_s: when planning began, when the executor got the plan, and when
            its result had come. With more than one step in flight, a step is planned and handed
            over while the one before it is computed.
        seconds: how long the executor took for the step.
        received_s: when the front end received the record; set there.
        predicted_s: the step-time model's prediction of `seconds`; None while step times are
            unknown.
        limit_s: how long the step was allowed to take; None if no token was due.
        budget_tokens: most tokens that the step was allowed to hold.
        admitted: requests that began to run; key request id, value number of its tokens that were
            computed already.
        short_hits: admitted requests that could not use all cached blocks; key request id.
        preempted: requests that lost their blocks.
        drafts_ended_by: why there are no more drafts; None if none were asked for.
        drafting_s: how long a draft model took for drafts, before `started_s`.
        drafts_s: part of `predicted_s` that the step's drafts add; None if that is None.
        held_by: what kept the first waiting request out; None if no request waited or was
            considered.
        failed: requests whose chunk could not be computed.
        ran_out_of_memory: whether the planned step was too large.
        num_running, num_waiting: numbers of requests after planning.
        num_used_blocks: blocks of the KV cache in use, with the tokens of this step.
        num_cached_blocks: unused blocks that are kept for later requests.
        replica_id: the replica of a fleet that ran the step; each replica numbers its own steps.
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
    short_hits: dict[str, ShortHit] = msgspec.field(default_factory=dict)
    drafts_ended_by: DraftsEndedBy | None = None
    drafting_s: float = 0.0
    drafts_s: float | None = None
    replica_id: str = ""

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts, and of preempted requests."""
        return sum(chunk.num_tokens for chunk in self.chunks if chunk.kind == "prefill")

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of running streams: each stream's next token, and its drafts."""
        return sum(chunk.num_tokens for chunk in self.chunks if chunk.kind != "prefill")

    @property
    def num_draft_tokens(self) -> int:
        """Number of drafts among the tokens."""
        return sum(chunk.num_drafts for chunk in self.chunks)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that were right."""
        return sum(chunk.num_accepted for chunk in self.chunks)

    @property
    def num_dropped_tokens(self) -> int:
        """Tokens of prompts whose rows were dropped to keep the step's deadline."""
        return sum(chunk.num_dropped for chunk in self.chunks)

    @property
    def drafts_share(self) -> float | None:
        """Share of the step's time that its drafts are expected to take; None if unknown."""
        if self.predicted_s is None or self.drafts_s is None:
            return None
        return (self.drafting_s + self.drafts_s) / (self.drafting_s + self.predicted_s)

    @property
    def went_as_planned(self) -> bool:
        """Whether all rows were computed; only then is `seconds` comparable to `predicted_s`."""
        return not (self.failed or self.ran_out_of_memory or self.num_dropped_tokens)


class RequestArrived(msgspec.Struct, frozen=True, kw_only=True, tag="arrived", tag_field="kind"):
    """A request has come to the engine, which may refuse it at once.

    Attributes:
        arrived_s: when the front end sent it.
        taken_s: when the engine took it, at the end of the step during which it came.
        is_rerun: as in `AddRequest`.
        replica_id: the replica of a fleet that got the request; another if that one refused it or
            died.
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
        num_output_tokens: tokens sampled for it while records were made.
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
    """A request's grammar has been compiled, and the request has come to the scheduler.

    Attributes:
        ready_s: end of the step that ran when the grammar was compiled.
        compile_s: how long compiling took; next to nothing if an earlier request's grammar was
            kept.
    """

    request_id: str
    ready_s: float
    compile_s: float


class BlocksFetched(msgspec.Struct, frozen=True, kw_only=True, tag="fetched", tag_field="kind"):
    """A request has got the blocks of its prompt that come from another engine.

    Attributes:
        begun_s, ended_s: when the request was admitted and asked for the blocks, and when the last
            block had come, or no more would come.
        num_tokens: tokens whose blocks came.
        num_wanted_tokens: tokens whose blocks were asked for; missing blocks are computed here.
    """

    request_id: str
    begun_s: float
    ended_s: float
    num_tokens: int
    num_wanted_tokens: int


EngineRecord = StepRecord | RequestArrived | GrammarReady | BlocksFetched | RequestEnded


Operation = Literal[
    "chat", "messages", "responses", "text_completion", "generate", "embeddings", "score", "rerank"
]
"""The kind of an answer: one for each endpoint that has the engine compute something."""


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True, tag="answer", tag_field="kind"):
    """How the answer to one HTTP request went, from its first byte in to its last byte out.

    Attributes:
        http_id: the client's `X-Request-Id`.
        answer_id: the answer's `id` after its prefix.
        request_ids: ids of the completions that had any output; key the choice's index.
        received_s: when the first bytes of the request came.
        ended_s: when the end of the answer had been written; if it is not streamed, when all of it
            had come.
        sent_s: when the output of each token had gone to the client's socket; if the answer is not
            streamed, when the token came. Key the choice's index.
        finish_reasons: finish reasons of the completions as the client sees them; key the choice's
            index.
        error, error_type: message and kind of the error if the answer is missing or incomplete.
        num_prompt_tokens, num_output_tokens: tokens of all prompts and completions.
        n, max_tokens, temperature, top_p: as asked for.
        trace_context: headers of W3C's trace context in the request; key the header's name.
    """

    http_id: str
    answer_id: str
    operation: Operation
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
    """A step is about to be computed; its `StepRecord` follows when it has been.

    Attributes:
        planned_s, predicted_s, limit_s, budget_tokens: as in `StepRecord`.
        num_decode_tokens, replica_id: as there.
        prefill_tokens: tokens of prompts, and of preempted requests; key request id.
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
    """A request was sent to the engine, which takes it at the end of the running step.

    Attributes:
        arrived_s, num_prompt_tokens, slo_class: as in `RequestArrived`.
    """

    request_id: str
    arrived_s: float
    num_prompt_tokens: int
    slo_class: str


LiveRecord = StepBegun | RequestSent
"""Records of events that are not over, for live displays; traces do not have them."""


def received(record: EngineRecord, now_s: float) -> EngineRecord:
    """Return the record; a `StepRecord` gets the time at which the front end received it."""
    if isinstance(record, StepRecord):
        return msgspec.structs.replace(record, received_s=now_s)
    return record
