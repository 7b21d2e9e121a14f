"""Drives the real scheduler against the simulated executor, checking every plan on the way."""

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from legato.core.config import SchedulerConfig
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.plan import Fault, ScheduledChunk, StepPlan
from legato.core.request import AbortRequest, AddRequest, Request
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.executor.simulated import SimulatedExecutor, VirtualClock, simulated_token
from legato.kv.manager import KVCacheManager
from legato.scheduler.budget import UNLIMITED
from legato.scheduler.scheduler import Scheduler
from legato.scheduler.step_time import StepTimeModel

VOCAB_SIZE = 1000


class Harness:
    """A scheduler, its cache and a simulated model; `plans` keeps every step.

    Args:
        step_time: what the scheduler believes of the duration of steps.
        step_time_s: how long they really last.
        settings: further fields of `SchedulerConfig`.
    """

    def __init__(
        self,
        *,
        budget: int = 32,
        max_num_seqs: int = 8,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 128,
        max_waiting: int = 10_000,
        step_time: StepTimeModel | None = None,
        step_time_s: Callable[[StepPlan], float] = lambda plan: 0.01 + 0.001 * plan.num_tokens,
        **settings: Any,
    ) -> None:
        self.config = SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_waiting=max_waiting,
            **settings,
        ).resolve(max_model_len)
        self.max_model_len = max_model_len
        self.kv = KVCacheManager(num_blocks, block_size)
        self.scheduler = Scheduler(
            self.config, max_model_len=max_model_len, kv=self.kv, step_time=step_time
        )
        self.clock = VirtualClock()
        self.executor = SimulatedExecutor(self.clock, step_time_s, vocab_size=VOCAB_SIZE)
        self.added: dict[str, AddRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.token_times_s: dict[str, list[float]] = {}
        self.finish_reasons: dict[str, list[FinishReason]] = {}
        self.plans: list[StepPlan] = []
        self.cache: dict[tuple[int, int], tuple[str, int]] = {}
        """Key (block, offset), value (request id, position) of the token written there."""
        self.known: set[str] = set()
        """Requests that the executor has been told of and not yet of their end."""

    def add(self, request_id: str, prompt_len: int, max_tokens: int = 4, **service: Any) -> None:
        """Let a request arrive now; `service` is fields of `ServiceParams`."""
        request = AddRequest(
            request_id=request_id,
            prompt_token_ids=tuple(range(prompt_len)),
            params=SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0),
            service=ServiceParams(**service),
            arrival_time_s=self.clock(),
        )
        self.added[request_id] = request
        self.tokens[request_id] = []
        self.token_times_s[request_id] = []
        self.finish_reasons[request_id] = []
        self.take(self.scheduler.apply([request], self.clock()))

    def abort(self, request_id: str) -> None:
        self.take(self.scheduler.apply([AbortRequest(request_id=request_id)], self.clock()))

    def plan(self) -> StepPlan | None:
        decoding = [
            request
            for request in self.scheduler._queues.running.values()
            if request.num_remaining_tokens == 1
        ]
        plan = self.scheduler.plan(self.clock())
        if plan is None:
            return None
        self.plans.append(plan)
        self.check(plan, decoding)
        return plan

    def check(self, plan: StepPlan, decoding: list[Request]) -> None:
        """The invariants that one plan shows by itself."""
        budget = self.config.max_num_batched_tokens
        assert budget is not None
        ids = [chunk.request_id for chunk in plan.chunks]
        is_prefilling = bool(set(ids) - {request.request_id for request in decoding})
        assert plan.num_tokens <= budget or not is_prefilling
        assert not set(ids) & set(plan.preempted), "preempted and run in one step"
        assert len(set(ids)) == len(ids)
        if self.config.policy == "stall-free":
            self.check_streams(plan, decoding)
        owners: Counter[int] = Counter()
        for chunk in plan.chunks:
            assert chunk.num_tokens > 0
            assert len(chunk.block_ids) * self.kv.block_size >= chunk.end
            owners.update(chunk.block_ids)
        assert all(count == 1 for count in owners.values()), "a block has two owners"

    def check_streams(self, plan: StepPlan, decoding: list[Request]) -> None:
        """All streams advance, save that where a token is due best-effort ones may take turns."""
        ids = {chunk.request_id for chunk in plan.chunks}
        kept = [r for r in decoding if r.request_id not in plan.preempted]
        left_out = [r for r in kept if r.request_id not in ids]
        assert all(r.is_best_effort for r in left_out), "a running stream was left out"
        if left_out:
            assert any(r.token_due_s < UNLIMITED for r in kept), "left out, but nothing is due"
            assert any(r.is_best_effort and r.request_id in ids for r in kept), "nobody's turn"

    def run(
        self, plan: StepPlan, failing: Collection[str] = (), *, out_of_memory: bool = False
    ) -> None:
        """Compute a step; of the requests in `failing`, nothing."""
        self.hear(plan)
        computed = [chunk for chunk in plan.chunks if chunk.request_id not in failing]
        for chunk in computed:
            self.write_cache(chunk)
        self.executor.submit(plan.part(computed))
        result = msgspec.structs.replace(
            self.executor.collect(),
            faults=dict.fromkeys(failing, Fault("boom", out_of_memory)),
            ran_out_of_memory=out_of_memory,
        )
        self.take(self.scheduler.commit(plan, result, self.clock()))

    def hear(self, plan: StepPlan) -> None:
        """What an executor would do: note who comes and who is gone."""
        self.known.difference_update(plan.ended_requests)
        self.known.update(request.request_id for request in plan.new_requests)
        assert self.known.issuperset(chunk.request_id for chunk in plan.chunks)

    def write_cache(self, chunk: ScheduledChunk) -> None:
        """What a model would do: read all tokens before the chunk, and write the chunk's."""
        for position in range(chunk.end):
            index, offset = divmod(position, self.kv.block_size)
            slot = chunk.block_ids[index], offset
            if position >= chunk.start:
                self.cache[slot] = chunk.request_id, position
            assert self.cache.get(slot) == (chunk.request_id, position), "reads what is not there"

    def step(self) -> StepPlan | None:
        plan = self.plan()
        if plan is not None:
            self.run(plan)
        return plan

    def drain(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            assert self.step() is not None, "there is work, but no step"
        raise AssertionError("the scheduler does not come to an end")

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert not self.finish_reasons[output.request_id], "an output after the end"
            self.tokens[output.request_id] += output.new_token_ids
            self.token_times_s[output.request_id] += [self.clock()] * len(output.new_token_ids)
            if output.finish_reason is not None:
                self.finish_reasons[output.request_id].append(output.finish_reason)

    def expected_tokens(self, request_id: str) -> list[int]:
        """What the request gets when it runs undisturbed."""
        request = self.added[request_id]
        start = len(request.prompt_token_ids)
        assert request.params.max_tokens is not None
        count = min(request.params.max_tokens, self.max_model_len - start)
        return [simulated_token(request_id, start + i, VOCAB_SIZE) for i in range(count)]
