"""Decides what each step computes and books what it brought.

Pure Python: the same object drives the real model, the simulator and the property tests. Time is an
argument, blocks are asked of a KV manager, and the executor is never seen.
"""

from collections.abc import Iterable

import msgspec

from legato.core.config import SchedulerConfig
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.plan import ScheduledChunk, StepPlan, StepResult
from legato.core.request import AbortRequest, AddRequest, Event, Request
from legato.scheduler.budget import StepBudget, TokenBudget
from legato.scheduler.policy import POLICIES
from legato.scheduler.queues import Queues
from legato.scheduler.step_builder import KVManager, StepBuilder


class SchedulerStats(msgspec.Struct, frozen=True):
    """A snapshot; the last two count from the start.

    Attributes:
        num_steps_over_budget: steps that held more than their budget, for their decodes alone.
    """

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_steps_over_budget: int


class Scheduler:
    """`apply` what came in, `plan` a step, `commit` its result; one step is in flight at a time.

    Args:
        config: resolved, so that its token budget is a number.
        max_model_len: tokens at which a request ends; the cache must hold at least one such.
        budget: size of a step; None takes the fixed token budget of the config.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        kv: KVManager,
        budget: StepBudget | None = None,
    ) -> None:
        assert config.max_num_batched_tokens is not None
        self._config = config
        self._max_model_len = max_model_len
        self._kv = kv
        self._budget = budget or TokenBudget(config.max_num_batched_tokens)
        self._fill = POLICIES[config.policy]
        self._queues = Queues()
        self._in_flight: StepPlan | None = None
        self._known_to_executor: set[str] = set()
        self._ended: list[str] = []  # known to the executor, which is not yet told of their end
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_steps_over_budget = 0

    @property
    def has_work(self) -> bool:
        return bool(self._queues)

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._queues.running),
            num_waiting=len(self._queues.waiting),
            num_preemptions=self._num_preemptions,
            num_steps_over_budget=self._num_steps_over_budget,
        )

    def apply(self, events: Iterable[Event]) -> list[RequestOutput]:
        """Take new requests and aborts; returns the ends that are known at once."""
        outputs: list[RequestOutput] = []
        for event in events:
            match event:
                case AddRequest():
                    outputs += self._add(event)
                case AbortRequest():
                    outputs += self._abort(event.request_id)
        return outputs

    def plan(self) -> StepPlan | None:
        """Pick the chunks of the next step, or None if nothing can run."""
        assert self._in_flight is None, "a step is in flight"
        step = StepBuilder(
            self._queues,
            self._kv,
            self._budget,
            max_num_seqs=self._config.max_num_seqs,
            enable_chunked_prefill=self._config.enable_chunked_prefill,
        )
        self._fill(step)
        self._num_preemptions += len(step.preempted)
        self._num_steps_over_budget += step.is_over_budget
        if not step.chunks:
            return None
        self._in_flight = StepPlan(
            step_id=self._num_steps,
            chunks=tuple(step.chunks),
            new_requests=self._introduce(step.chunks),
            ended_requests=tuple(self._ended),
            preempted=tuple(request.request_id for request in step.preempted),
        )
        self._num_steps += 1
        self._ended.clear()
        return self._in_flight

    def commit(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Book a step's tokens and release the blocks of what ended."""
        outputs: list[RequestOutput] = []
        for chunk in self._land(plan):
            request = self._queues.running[chunk.request_id]
            if request.finish_reason is None:
                request.num_computed_tokens = chunk.end
                outputs += self._take_tokens(request, result)
            if request.finish_reason is not None:
                self._end(request)
                if request.finish_reason is FinishReason.ABORT:
                    outputs.append(_ended(request.request_id, FinishReason.ABORT))
        return outputs

    def fail(self, plan: StepPlan, error: str) -> list[RequestOutput]:
        """Book a step that raised: its requests end, all others are as before."""
        outputs: list[RequestOutput] = []
        for chunk in self._land(plan):
            request = self._queues.running[chunk.request_id]
            reason = request.finish_reason or FinishReason.ERROR
            self._end(request)
            outputs.append(_ended(chunk.request_id, reason, error))
        return outputs

    def _add(self, message: AddRequest) -> list[RequestOutput]:
        assert message.request_id not in self._queues, "request ids are unique"
        if len(self._queues.waiting) >= self._config.max_waiting:
            error = f"{len(self._queues.waiting)} requests are waiting already"
            return [_ended(message.request_id, FinishReason.REFUSED, error)]
        self._queues.add(Request(message))
        return []

    def _abort(self, request_id: str) -> list[RequestOutput]:
        request = self._queues.get(request_id)
        if request is None:
            return []
        if self._in_flight and any(c.request_id == request_id for c in self._in_flight.chunks):
            # Its blocks are being written: commit releases them.
            request.finish_reason = FinishReason.ABORT
            return []
        self._end(request)
        return [_ended(request_id, FinishReason.ABORT)]

    def _introduce(self, chunks: list[ScheduledChunk]) -> tuple[AddRequest, ...]:
        new = [c.request_id for c in chunks if c.request_id not in self._known_to_executor]
        self._known_to_executor.update(new)
        return tuple(self._queues.running[request_id].message for request_id in new)

    def _land(self, plan: StepPlan) -> tuple[ScheduledChunk, ...]:
        assert plan is self._in_flight, "this step is not in flight"
        self._in_flight = None
        return plan.chunks

    def _take_tokens(self, request: Request, result: StepResult) -> list[RequestOutput]:
        request_id = request.request_id
        token_ids: list[int] = []
        for token_id in result.sampled.get(request_id, ()):
            request.append(token_id, self._max_model_len)
            token_ids.append(token_id)
            if request.finish_reason is not None:
                break
        prompt_logprobs = result.prompt_logprobs.get(request_id)
        if not token_ids and prompt_logprobs is None:
            return []
        logprobs = result.logprobs.get(request_id)
        return [
            RequestOutput(
                request_id=request_id,
                new_token_ids=tuple(token_ids),
                logprobs=None if logprobs is None else tuple(logprobs[: len(token_ids)]),
                prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
                finish_reason=request.finish_reason,
                stop_reason=request.stop_reason,
            )
        ]

    def _end(self, request: Request) -> None:
        self._queues.remove(request)
        self._kv.release(request.request_id)
        if request.request_id in self._known_to_executor:
            self._known_to_executor.discard(request.request_id)
            self._ended.append(request.request_id)


def _ended(request_id: str, reason: FinishReason, error: str | None = None) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason=reason, error=error)
