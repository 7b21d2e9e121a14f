"""Makes records of each step and, while recording is on, of requests that come and end."""

from collections import Counter
from collections.abc import Iterable, Mapping

from legato.core.outputs import RequestOutput
from legato.core.plan import ChunkResult, ScheduledChunk, StepPlan, StepResult
from legato.core.request import AddRequest, Event
from legato.core.step_record import (
    BlocksFetched,
    ChunkRecord,
    EngineRecord,
    GrammarReady,
    RequestArrived,
    RequestEnded,
    StepBegun,
    StepRecord,
)
from legato.kv.manager import KVCacheManager
from legato.scheduler.scheduler import Scheduler


class Recorder:
    """Collects records until they are taken.

    Args:
        is_on: whether to keep all records, or only the latest step's.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.restart(is_on=is_on)

    def restart(self, *, is_on: bool) -> None:
        """Drop all records, and keep all or only the latest step's from now on."""
        self._is_on = is_on
        self._records: list[EngineRecord] = []
        self._num_output_tokens: Counter[str] = Counter()  # key: id of a request that runs

    def take(self) -> list[EngineRecord]:
        """Return the records since the last call, in the order of events."""
        records, self._records = self._records, []
        return records

    def note_events(self, events: Iterable[Event], now_s: float) -> None:
        """Record the requests that came."""
        if self._is_on:
            self._records += [_arrived(e, now_s) for e in events if isinstance(e, AddRequest)]

    def note_grammars(self, compile_s: Mapping[str, float], now_s: float) -> None:
        """Record compiled grammars. Args: compile_s: key: request id, value: compile time."""
        if self._is_on:
            self._records += [
                GrammarReady(request_id=request_id, ready_s=now_s, compile_s=seconds)
                for request_id, seconds in compile_s.items()
            ]

    def note_fetched(self, fetched: Iterable[BlocksFetched]) -> None:
        """Record blocks that came from other engines."""
        if self._is_on:
            self._records += fetched

    def note_step(
        self,
        plan: StepPlan,
        result: StepResult,
        times_s: tuple[float, float, float],
        scheduler: Scheduler,
        kv: KVCacheManager,
    ) -> None:
        """Record a step that was computed, before it is committed.

        Args:
            times_s: `planned_s`, `started_s` and `ended_s`.
        """
        planned_s, started_s, ended_s = times_s
        if not self._is_on:
            self._records.clear()
        self._records.append(
            StepRecord(
                step_id=plan.step_id,
                planned_s=planned_s,
                started_s=started_s,
                ended_s=ended_s,
                seconds=result.seconds,
                predicted_s=plan.predicted_s,
                limit_s=plan.limit_s,
                budget_tokens=plan.budget_tokens,
                chunks=tuple(_recorded(c, result.chunks.get(c.request_id)) for c in plan.chunks),
                admitted=plan.admitted,
                short_hits=plan.short_hits,
                preempted=plan.preempted,
                held_by=plan.held_by,
                drafts_ended_by=plan.drafts_ended_by,
                drafting_s=plan.drafting_s,
                drafts_s=plan.drafts_s,
                failed=tuple(result.faults),
                ran_out_of_memory=result.ran_out_of_memory,
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                num_blocks=kv.num_blocks,
                num_used_blocks=kv.num_blocks - kv.num_free_blocks,
                num_cached_blocks=kv.num_cached_blocks,
            )
        )

    def note_outputs(self, outputs: Iterable[RequestOutput], now_s: float) -> None:
        """Record the requests that ended."""
        if not self._is_on:
            return
        for output in outputs:
            self._num_output_tokens[output.request_id] += len(output.new_token_ids)
            if output.finish_reason is not None:
                num_output_tokens = self._num_output_tokens.pop(output.request_id)
                self._records.append(_ended(output, num_output_tokens, now_s))


def begun(plan: StepPlan, planned_s: float) -> StepBegun:
    """Return the record of a step that is about to be computed."""
    prefills = [chunk for chunk in plan.chunks if chunk.kind == "prefill"]
    prefill_tokens = {chunk.request_id: chunk.num_tokens for chunk in prefills}
    return StepBegun(
        step_id=plan.step_id,
        planned_s=planned_s,
        predicted_s=plan.predicted_s,
        limit_s=plan.limit_s,
        budget_tokens=plan.budget_tokens,
        num_decode_tokens=plan.num_tokens - sum(prefill_tokens.values()),
        prefill_tokens=prefill_tokens,
    )


def _recorded(chunk: ScheduledChunk, done: ChunkResult | None) -> ChunkRecord:
    is_verified = chunk.kind == "verify" and done is not None and done.token_ids
    num_dropped = 0 if done is None else done.num_dropped
    chunk = chunk.first_rows(chunk.num_tokens - num_dropped)
    return ChunkRecord(
        chunk.request_id,
        chunk.start,
        chunk.num_tokens,
        chunk.num_samples,
        chunk.kind,
        chunk.ended_by,
        chunk.drafter,
        len(done.token_ids) - 1 if done is not None and is_verified else 0,
        num_dropped,
    )


def _arrived(request: AddRequest, now_s: float) -> RequestArrived:
    return RequestArrived(
        request_id=request.request_id,
        arrived_s=request.sent_s,
        taken_s=now_s,
        num_prompt_tokens=len(request.prompt_token_ids),
        max_tokens=request.params.max_tokens,
        slo_class=request.service.slo_class,
        priority=request.service.priority,
        is_rerun=request.is_rerun,
        tenant=request.service.tenant,
    )


def _ended(output: RequestOutput, num_output_tokens: int, now_s: float) -> RequestEnded:
    assert output.finish_reason is not None
    return RequestEnded(
        request_id=output.request_id,
        ended_s=now_s,
        finish_reason=output.finish_reason,
        num_output_tokens=num_output_tokens,
        num_cached_tokens=output.num_cached_tokens,
        error=output.error,
    )
