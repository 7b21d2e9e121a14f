"""The invariants that one plan of the scheduler shows by itself."""

from collections.abc import Collection, Sequence

from legato.core.config import SchedulerConfig
from legato.core.plan import ScheduledChunk, StepPlan
from legato.core.request import Request
from legato.scheduler.budget import UNLIMITED
from legato.scheduler.scheduler import Scheduler


class PlanChecks:
    """Checks the plans of a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._kv = scheduler._kv

    @property
    def _config(self) -> SchedulerConfig:
        return self._scheduler._config

    def check(
        self,
        plan: StepPlan,
        before: Collection[StepPlan],
        decoding: dict[Request, float],
        early: set[str],
    ) -> None:
        """Check a plan.

        Args:
            before: the steps in flight when it was planned.
            decoding: key each stream, value when its token was due, in seconds.
            early: ids of requests preempted before it was planned.
        """
        budget = self._config.max_num_batched_tokens
        assert budget is not None
        ids = [chunk.request_id for chunk in plan.chunks]
        is_prefilling = bool(set(ids) - {request.request_id for request in decoding})
        num_drafts = sum(len(chunk.draft_token_ids) for chunk in plan.chunks)
        assert plan.num_tokens <= budget or not (is_prefilling or num_drafts)
        assert not set(ids) & (set(plan.preempted) - early), "preempted and run in one step"
        assert len(set(ids)) == len(ids)
        if self._config.policy == "stall-free":
            self._check_streams(plan, decoding)
        earlier = [chunk for one in before for chunk in one.chunks]
        writers: dict[int, str] = {}  # key block
        for chunk in plan.chunks:
            self._check_foresight(chunk, earlier)
            assert chunk.num_tokens > 0
            assert len(chunk.block_ids) * self._kv.block_size >= chunk.end
            self._check_drafts(chunk, earlier)
            for block_id in self._written_blocks(chunk):
                assert block_id not in self._kv.holds._arriving, "written by a transfer, too"
                assert writers.setdefault(block_id, chunk.request_id) == chunk.request_id, (
                    "a block has two writers"
                )
        if plan.deadline is not None:
            self._check_deadline(plan, decoding)
        if self._kv.states is not None:
            kept = set(self._kv.states.checkpoints.slots.values())
            changes = [chunk.state for chunk in plan.chunks if chunk.state is not None]
            written = [slot for one in changes for slot in (*one.earlier, one.destination)]
            assert len(set(written)) == len(written) == len(plan.chunks) + num_drafts
            assert kept.isdisjoint(written), "a checkpoint is written to"
        for chunk in plan.chunks:
            for block_id in chunk.block_ids[: -(-chunk.end // self._kv.block_size)]:
                writer = writers.get(block_id, chunk.request_id)
                assert writer == chunk.request_id, "reads what another writes in this step"

    def _check_deadline(self, plan: StepPlan, decoding: dict[Request, float]) -> None:
        """A promised token is due, and the last rows are prompts'."""
        deadline, kinds = plan.deadline, [chunk.kind for chunk in plan.chunks]
        assert deadline is not None
        assert plan.limit_s == deadline.late_s >= deadline.layers_s
        assert 0.0 <= deadline.prefill_share <= 1.0
        ids = {chunk.request_id for chunk in plan.chunks}
        assert any(s < UNLIMITED for r, s in decoding.items() if r.request_id in ids)
        assert kinds == sorted(kinds, key=lambda kind: kind == "prefill")
        assert kinds[-1] == "prefill"

    def _check_drafts(self, chunk: ScheduledChunk, earlier: list[ScheduledChunk]) -> None:
        """Drafts follow a stream's next token, and no step is planned until they are checked."""
        num_drafts = len(chunk.draft_token_ids)
        assert (chunk.kind == "verify") == (num_drafts > 0) == (chunk.drafter is not None)
        if num_drafts:
            assert self._config.speculative != "off"
            assert chunk.num_tokens == chunk.num_samples == 1 + num_drafts
        assert not any(c.draft_token_ids for c in earlier)

    def _check_foresight(self, chunk: ScheduledChunk, earlier: list[ScheduledChunk]) -> None:
        """No row after a request's end, or before the values are known that it takes."""
        request = self._scheduler._queues.running[chunk.request_id]
        assert request.finish_reason is None
        assert chunk.end < request.num_final_tokens + request.is_pooled
        assert not (request.is_pooled and chunk.num_samples)
        sampled = [c for c in earlier if c.request_id == chunk.request_id and c.num_samples]
        assert not (sampled and request.params.needs_values)

    def _written_blocks(self, chunk: ScheduledChunk) -> Sequence[int]:
        size = self._kv.block_size
        return chunk.block_ids[chunk.start // size : -(-chunk.end // size)]

    def _check_streams(self, plan: StepPlan, decoding: dict[Request, float]) -> None:
        """All streams advance, save that where a token is due best-effort ones may be left out."""
        ids = {chunk.request_id for chunk in plan.chunks}
        kept = [r for r in decoding if r.request_id not in plan.preempted]
        left_out = [r for r in kept if r.request_id not in ids]
        assert all(r.is_best_effort for r in left_out), "a running stream was left out"
        if left_out:
            assert any(decoding[r] < UNLIMITED for r in kept), "left out, but nothing is due"
