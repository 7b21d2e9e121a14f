"""Decides what each step computes, and records its result.

Pure Python: the same object drives the real model, the simulator and the property tests. Time is an
argument, blocks come from a KV manager, and the executor is never seen.
"""

from collections.abc import Iterable, Mapping, Sequence

from legato.core.config import SchedulerConfig
from legato.core.containment import Containment
from legato.core.kv_transfer import BlocksArrived
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.plan import ChunkResult, Fault, ScheduledChunk, StepPlan, StepResult
from legato.core.replica_state import ReplicaState
from legato.core.request import AbortRequest, AddRequest, Event, Request
from legato.core.slo import INTERACTIVE
from legato.core.stats import SchedulerStats
from legato.kv.manager import KVCacheManager
from legato.scheduler.admission import Admission
from legato.scheduler.budget import MIN_CHUNK, StepBudget
from legato.scheduler.decodes import Decodes, divided
from legato.scheduler.dispatch import Dispatch
from legato.scheduler.drafting import Drafters
from legato.scheduler.expected_ends import OutputLengths
from legato.scheduler.forecast import FetchTime, Forecast, Lateness, Outlook
from legato.scheduler.load_shedding import ForecastErrors, LoadShedding
from legato.scheduler.margin import allowed_miss_rate
from legato.scheduler.metering import book_step
from legato.scheduler.order import HIT_AWARE, ORDERS
from legato.scheduler.policy import POLICIES
from legato.scheduler.prefills import Prefills
from legato.scheduler.queues import Queues
from legato.scheduler.replanning import Replanning, ended, failed, faulted
from legato.scheduler.step import Step
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel
from legato.scheduler.tenants import Tenants
from legato.scheduler.thinking import ThinkingBudgets, given_logprobs
from legato.speculation.drafter import CostlyDrafter, Drafter

_LOOKED_UP = 2
"""Waiting requests per step whose cache hits are updated, in orders that depend on hits."""


class Scheduler:
    """Applies events, plans steps, and commits their results in the same order.

    More than one step may be in flight. The next step is then planned before their tokens are
    known, as if each stream went on: it gets its next token, and ends only at its length limit. A
    wrong guess is corrected when the step lands: the chunk of a request that has ended meanwhile is
    discarded.

    All times are seconds on the clock of `AddRequest.arrival_time_s`.

    Args:
        config: resolved: every field has its final value.
        max_model_len: tokens at which a request ends; the cache must hold at least one such
            request.
        step_time: predicts the duration of steps, and learns from every step.
        drafters: propose drafts unless `speculative` is off.
        draft_model: likewise, when it is worth its time.

    Attributes:
        broken_promise: as in `SchedulerStats`.
        containment: records errors in the bookkeeping of one request.
        replanning: goes on after `plan`, `withdraw` or `commit` raised.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        kv: KVCacheManager,
        step_time: StepTimeModel | None = None,
        drafters: Sequence[Drafter] = (),
        draft_model: CostlyDrafter | None = None,
    ) -> None:
        self.containment = Containment()
        self._max_model_len = max_model_len
        self._kv = kv
        self._step_time = step_time or StepTimeModel()
        self._tenants = Tenants(config.tenant_weights)
        self._queues = Queues(ORDERS[config.prefill_order], self._tenants)
        self._forecast_errors = ForecastErrors()
        self._fetch_time = FetchTime(kv.holds)
        running = self._queues.running
        self._lengths = OutputLengths(config.admission_optimism, max_model_len, running)
        self._drafters = Drafters(drafters, draft_model, self._step_time, self._lengths)
        self._configure(config)
        self._drafters.configure(config, self._budget)
        self._dispatch = Dispatch(kv, self._step_time)
        self._requests: dict[str, Request] = {}  # all, even if a queue lost one; key request id
        self.replanning = Replanning(
            self.plan, self._end, self._requests, self._queues, kv, self._dispatch, self.containment
        )
        self._thoughts = ThinkingBudgets()
        self._was_hurried = False
        self.broken_promise = ""
        self._num_preemptions = 0
        self._num_steps_over_budget = 0
        self._num_prefix_cache_queries = 0
        self._num_prefix_cache_hits = 0
        self._num_prefix_cache_short = 0

    @property
    def has_work(self) -> bool:
        return bool(self._queues or self._dispatch.num_in_flight)

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        return self._queues.num_waiting

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_preemptions=self._num_preemptions,
            num_steps_over_budget=self._num_steps_over_budget,
            step_time_margin=self._step_time.margin,
            broken_promise=self.broken_promise,
            num_prefix_cache_queries=self._num_prefix_cache_queries,
            num_prefix_cache_hits=self._num_prefix_cache_hits,
            num_prefix_cache_short=self._num_prefix_cache_short,
            tenants=self._tenants.stats,
        )

    def state(self, now_s: float) -> ReplicaState:
        """Return the present load, and the forecast for one more request."""
        delay_s, token_s = self._outlook.ttft_s(now_s)
        itl_s, stream_s = self._outlook.itl_s()
        return ReplicaState(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_blocks=self._kv.num_blocks,
            num_free_blocks=self._kv.num_free_blocks,
            block_size=self._kv.block_size,
            delay_s=delay_s,
            token_s=token_s,
            itl_s=itl_s,
            stream_s=stream_s,
            fetch_token_s=self._fetch_time.token_s,
            tenants=self._tenants.stats,
        )

    def reconfigure(self, config: SchedulerConfig, now_s: float) -> None:
        """Plan by other settings from the next step on; running requests keep running.

        A class's new promises also hold for its running and waiting requests: an operator who
        changes them means the present load. Requests that gave up their promise stay best-effort.

        If it raises, the settings are those of before.

        Args:
            config: resolved, with the same classes of service by name.
        """
        assert not self._dispatch.num_in_flight, "a step is in flight"
        before, waiting = self._config, self._queues.take_waiting()
        requests = (*self._queues.running.values(), *waiting)
        try:
            self._change_settings(config, requests, now_s)
        except Exception:
            self._change_settings(before, requests, now_s)
            raise
        finally:
            for request in waiting:
                self.replanning.wait(request)

    def _change_settings(
        self, config: SchedulerConfig, requests: Sequence[Request], now_s: float
    ) -> None:
        self._configure(config)
        self._drafters.configure(config, self._budget, requests)
        for request in requests:
            if not request.is_promise_waived:
                request.change_promise(self._classes[request.message.service.slo_class], now_s)
        self._queues.settle_running()

    def _configure(self, config: SchedulerConfig) -> None:
        self._config = config
        self._classes = config.classes
        self._step_time.promise(config.shortest_promise_s)
        # Drops a memory limit: a prompt that must not be chunked would never fit into it.
        assert config.max_num_batched_tokens is not None
        self._budget = StepBudget(
            self._step_time,
            config.max_num_batched_tokens,
            is_chunked=config.enable_chunked_prefill,
            bounds_gaps=config.bounds_gaps,
        )
        self._fill = POLICIES[config.policy]
        self._idle_limit_s = config.idle_limit_s
        self._lateness = Lateness(
            self._step_time, config.max_num_batched_tokens, self._idle_limit_s
        )
        forecast = Forecast(
            config, self._queues, self._step_time, self._budget, self._fetch_time, self._lengths
        )
        self._queues.configure(
            ORDERS[config.prefill_order],
            is_lost=self._lateness.is_lost,
            alone_s=forecast.prompt_s,
            keeps_deadlines=config.shed_load,
            has_promises=not all(slo.is_best_effort for slo in self._classes.values()),
        )
        self._outlook = Outlook(
            forecast, self._queues, self._classes[INTERACTIVE], self._max_model_len
        )
        self._shedding = LoadShedding(config, self._queues, forecast, self._forecast_errors)

    def apply(self, events: Iterable[Event], now_s: float) -> list[RequestOutput]:
        """Apply new requests, aborts and arrived blocks; return outputs of requests that end."""
        outputs: list[RequestOutput] = []
        for event in events:
            is_known = isinstance(event, AddRequest) or event.request_id in self._queues
            try:
                self._take(event, now_s, outputs)
            except Exception as error:
                self.containment.note(f"{type(event).__name__} of {event.request_id}", error)
                if is_known:
                    outputs.append(self.fail(event.request_id, error))
        return outputs

    def fail(self, request_id: str, error: Exception) -> RequestOutput:
        """End a request whose bookkeeping raised, running or waiting; return its last output."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request)
        return failed(request_id, error)

    def _take(self, event: Event, now_s: float, outputs: list[RequestOutput]) -> None:
        match event:
            case AddRequest():
                self._add(event, now_s, outputs)
            case AbortRequest():
                outputs += self._abort(event.request_id)
            case BlocksArrived(request_id=request_id, num_tokens=num_tokens):
                num_new = self._kv.holds.note_arrived(request_id, num_tokens)
                self._fetch_time.observe(num_new, event.read_s)
                if event.is_over:
                    self._kv.holds.end_arrival(request_id)

    def plan(self, now_s: float) -> StepPlan | None:
        """Pick the chunks of the next step.

        Returns:
            None if no request can run, or none before a step in flight has landed.
        """
        self._lateness.begin_step(now_s, is_idle=not self._queues.running)
        self._budget.recover(now_s)
        self._look_up_waiting()
        self._queues.is_urgent = self._shedding.is_urgent(self._lateness, now_s)
        queues, kv, config, dispatch = self._queues, self._kv, self._config, self._dispatch
        latest_first = reversed(queues.running.values())
        self._step_time.set_miss_rate(allowed_miss_rate(latest_first, self._classes.values()))
        begins_s = dispatch.look_ahead(now_s, queues.running)
        running = queues.joining
        streams, begun = divided(running, kv)
        admission = Admission(queues, kv, self._budget, self._lengths, config, running, now_s)
        decodes = Decodes(
            streams,
            queues,
            admission,
            kv,
            self._budget,
            begins_s=begins_s,
            idle_limit_s=self._idle_limit_s,
            may_hurry=not self._was_hurried,
            max_wait_s=config.max_wait_s,
        )
        # How many drafts are accepted is known only when their step has landed.
        if dispatch.has_drafts or (dispatch.num_in_flight and decodes.must_wait):
            return None
        prefills = Prefills(begun, queues, admission, dispatch, kv, config, now_s)
        try:
            admission.let_yield()
            step = self._fill(decodes, prefills)
        finally:  # these changes stay, even if the plan fails
            self._num_preemptions += len(admission.preempted)
            dispatch.note_changes(admission)
        drafts_ended_by = self._drafters.draft(step, decodes)
        self._note_budget(step, prefills, admission.too_slow)
        self._num_prefix_cache_short += admission.num_short_tokens
        if not step.chunks:
            return None
        assert config.max_num_batched_tokens is not None
        plan = dispatch.plan(
            step,
            queues.running,
            held_by=prefills.held_by,
            drafts_ended_by=drafts_ended_by,
            budget_tokens=config.max_num_batched_tokens,
            now_s=now_s,
            begins_s=begins_s,
        )
        self._was_hurried = step.is_for_streams
        with self.containment.containing("the booking of a step"):  # it is in flight already
            # The rest of a limit after an interruption says nothing about the steps to come.
            usual_s = config.shortest_promise_s if step.is_due else step.limit_s
            self._lateness.end_step(step.shape, max(step.limit_s, usual_s))
            book_step(plan.chunks, queues, self._step_time, plan.predicted_s)
        return plan

    def commit(self, result: StepResult, now_s: float) -> list[RequestOutput]:
        """Record the result of the oldest step in flight; return the outputs of its requests."""
        outputs: list[RequestOutput] = []
        plan = self._land(result, now_s)
        running, chunks = self._queues.running, result.chunks
        landed, share = self._kv.landed, self._kv.commit
        for chunk in plan.chunks:
            request = running.get(chunk.request_id)
            if request is None:
                continue  # the request ended while the step was in flight
            try:
                done = landed(chunk, self._thoughts.counted(request, chunks.get(chunk.request_id)))
                if done is not None:
                    request.num_computed_tokens = chunk.start + done.num_tokens
                if request.finish_reason is not None:
                    own = [ended(request.request_id, request.finish_reason)]
                elif done is not None:
                    own = self._take_tokens(request, done, now_s)
                else:
                    own = self._take_fault(request, chunk, result.faults)
                if done is not None:
                    share(request)  # its new tokens, too
                outputs += own
                if request.finish_reason is not None:
                    self._end(request)
                elif not request.num_passed_over and (
                    done is None
                    or done.num_tokens != chunk.num_tokens
                    or len(done.token_ids) != chunk.num_samples
                ):
                    request.settle()  # later chunks must not build on this one
            except Exception as error:
                self.containment.note(f"the result of {chunk.request_id}", error)
                outputs.append(self.fail(chunk.request_id, error))
        return outputs

    def record_delivery(self, delay_change_s: float) -> None:
        """Record the delivery of a step's tokens to clients.

        Args:
            delay_change_s: how much longer the delivery took than that of the step before; may be
                negative.
        """
        self._dispatch.record_delivery(delay_change_s)

    def record_turnaround(self, seconds: float) -> None:
        """Record the work between two steps, which a step in flight hides from the device.

        Args:
            seconds: from the landing of a step to the submission of the next.
        """
        self._drafters.record_turnaround(seconds)

    def withdraw(self) -> list[RequestOutput]:
        """Forget the newest step in flight, which the executor will not compute.

        Returns:
            the outputs of aborted requests that waited for this step alone.
        """
        return self.replanning.withdraw()

    def _land(self, result: StepResult, now_s: float) -> StepPlan:
        flight = self._dispatch.land(result)
        with self.containment.containing("the end of a step", self.replanning.require):
            self._kv.end_step()
            self._dispatch.learn(flight, result, now_s)
        if result.ran_out_of_memory and self._config.enable_chunked_prefill:
            self._budget.lower(flight.shape.num_prefill_tokens, now_s)
        return flight.plan

    def _add(self, message: AddRequest, now_s: float, outputs: list[RequestOutput]) -> None:
        assert message.request_id not in self._queues, "request ids are unique"
        slo = self._classes[message.service.slo_class]
        request = Request(message, slo, self._max_model_len)
        request.num_hit_tokens = self._kv.lookup.num_hit_tokens(request)
        if not self.has_work:
            self._step_time.forget_present()
        begins_s = self._dispatch.look_ahead(now_s, self._queues.running)
        self._queues.note_arrival(request, now_s)
        refusals = [] if message.is_rerun else self._shedding.check_arrival(request, begins_s)
        for refused, output in refusals:
            self._queues.tenant(refused).count_refused()
            outputs.append(output)
            if refused is not request:
                self._end(refused)
        if not any(refused is request for refused, _ in refusals):
            self._requests[request.request_id] = request
            self._queues.add(request)

    def _look_up_waiting(self) -> None:
        """Update the cache hits of a few waiting requests.

        The hits of the others may be out of date; they are looked up again when a request begins.
        """
        for _ in range(_LOOKED_UP if self._config.prefill_order in HIT_AWARE else 0):
            request = self._queues.rotate_waiting()
            if request is None:
                return
            num_hit_tokens = self._kv.lookup.num_hit_tokens(request)
            if num_hit_tokens != request.num_hit_tokens:
                request.num_hit_tokens = num_hit_tokens
                self._queues.rerank(request)

    def _note_budget(self, step: Step, prefills: Prefills, too_slow: StepShape | None) -> None:
        self.broken_promise = ""
        refused = step.with_refused(too_slow) if prefills.are_left_out(step) else None
        if refused is not None:
            self._step_time.decay_margin(refused, step.limit_s)
        if step.is_over_budget:
            self._num_steps_over_budget += 1
            self.broken_promise = self._budget.explain(step.shape, step.limit_s)

    def _abort(self, request_id: str) -> list[RequestOutput]:
        request = self._queues.get(request_id)
        if request is None:
            return []
        if request.is_in_flight:
            # The part of its prompt that the step computes is worth keeping.
            request.abort_in_flight()
            return []
        self._end(request)
        return [ended(request_id, FinishReason.ABORT)]

    def _take_fault(
        self, request: Request, chunk: ScheduledChunk, faults: Mapping[str, Fault]
    ) -> list[RequestOutput]:
        if request.num_passed_over:
            request.pass_over()
            return []
        fault = faults[chunk.request_id]
        can_be_shorter = self._config.enable_chunked_prefill and chunk.num_tokens > MIN_CHUNK
        return [] if fault.is_out_of_memory and can_be_shorter else [faulted(request, fault)]

    def _take_tokens(
        self, request: Request, done: ChunkResult, now_s: float
    ) -> list[RequestOutput]:
        is_pooled = request.is_pooled_whole
        if is_pooled or (request.first_token_s is None and done.token_ids):
            if request.message.choice == 0:  # the others find its blocks in the cache
                self._num_prefix_cache_queries += request.num_tokens
                self._num_prefix_cache_hits += request.num_cached_tokens
            self._forecast_errors.observe(request, now_s)
        num_taken = 0
        if done.token_ids:
            request.num_given_tokens = 0  # they are computed
        for token_id in done.token_ids:
            request.append(token_id, now_s)
            num_taken += 1
            if request.finish_reason is not None:
                break
        if done.is_complete or is_pooled:
            request.complete()
        given, num_thinking_tokens, is_cut = self._thoughts.ended(request, self._dispatch.count_of)
        if num_taken and request.finish_reason is None:
            self._drafters.advance(request)
        if not num_taken and done.prompt_logprobs is None and request.finish_reason is None:
            return []
        return [
            RequestOutput(
                request_id=request.request_id,
                new_token_ids=(*done.token_ids[:num_taken], *given),
                logprobs=given_logprobs(request, done.logprobs, num_taken, given),
                prompt_logprobs=done.prompt_logprobs,
                finish_reason=request.finish_reason,
                stop_reason=request.stop_reason,
                num_cached_tokens=request.num_cached_tokens,
                is_promise_waived=request.is_promise_waived,
                scheduled_s=request.scheduled_s,
                pooled=done.pooled,
                num_thinking_tokens=num_thinking_tokens,
                is_thinking_cut=is_cut,
            )
        ]

    def _end(self, request: Request) -> None:
        """Release everything that a request holds; a part that raises is tried once more."""
        leave = self.replanning.leave
        forget = self._drafters.forget, self._thoughts.forget
        parts = (leave, self._kv.release, *forget, self._note_end)
        self._requests.pop(request.request_id, None)
        for release in parts:
            for _ in range(2):
                try:
                    release(request)
                    break
                except Exception as error:
                    self.containment.note(f"the release of {request.request_id}", error)

    def _note_end(self, request: Request) -> None:
        self._dispatch.end(request.request_id)
        if request.num_output_tokens:
            self._lengths.observe(request)
