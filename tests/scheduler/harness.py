"""Drives the real scheduler against the simulated executor, checking every plan on the way."""

import zlib
from array import array
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from legato.core.config import SchedulerConfig
from legato.core.kv_transfer import BlocksArrived, FetchBlocks, SendBlocks
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.plan import (
    ChunkResult,
    Fault,
    RowCut,
    ScheduledChunk,
    StepPlan,
    StepResult,
)
from legato.core.pooling import Pooling
from legato.core.request import AbortRequest, AddRequest, Request
from legato.core.sampling_params import SamplingParams, ThinkingLimit
from legato.core.slo import ServiceParams
from legato.core.token_ids import token_array
from legato.executor.simulated import SimulatedExecutor, VirtualClock
from legato.kv.hold import Hold
from legato.kv.manager import KVCacheManager
from legato.kv.state_slots import StateSlots
from legato.kv.window_groups import WindowGroups
from legato.scheduler.scheduler import Scheduler
from legato.scheduler.step_time import StepTimeModel
from legato.speculation.drafter import CostlyDrafter, Drafter
from tests.scheduler.plan_checks import PlanChecks
from tests.scheduler.shadow_cache import ShadowCache
from tests.scheduler.thoughts import Thoughts

VOCAB_SIZE = 1000
GARBAGE = ChunkResult(7, (VOCAB_SIZE,))
"""What an executor makes of a chunk whose request has ended."""
_LONGEST_PROMPT = 100_000
_TRANSFERS = {
    None: None,
    "send": SendBlocks("a"),
    "fetch": FetchBlocks("a", "127.0.0.1", 1),
}
"""Key a `kv_role`."""


class Harness:
    """A scheduler, its cache and a simulated model; `plans` keeps every step.

    Args:
        states: slots for recurrent states and as many steps in flight as `depth`; None if the model
            has none.
        windows: block tables of layers with windows; None if the model has none.
        depth: steps that may be in flight, which `step` and `drain` keep so.
        step_time: what the scheduler believes of the duration of steps.
        step_time_s: how long they really last.
        clock: made if None.
        settings: further fields of `SchedulerConfig`.

    Attributes:
        num_computed: key request id, value how many tokens of its chunks counted.
        num_drafted, num_accepted: drafts that were computed, and those of them that were right.
        in_flight: planned and not yet run, the oldest first.
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
        enable_prefix_caching: bool = True,
        num_host_slots: int = 0,
        states: StateSlots | None = None,
        windows: WindowGroups | None = None,
        depth: int = 1,
        drafters: Sequence[Drafter] = (),
        draft_model: CostlyDrafter | None = None,
        step_time: StepTimeModel | None = None,
        step_time_s: Callable[[StepPlan], float] = lambda plan: 0.01 + 0.001 * plan.num_tokens,
        clock: VirtualClock | None = None,
        **settings: Any,
    ) -> None:
        self.config = SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_waiting=max_waiting,
            **settings,
        ).resolve(max_model_len)
        self.max_model_len = max_model_len
        self.kv = KVCacheManager(
            num_blocks,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            num_host_slots=num_host_slots,
            states=states,
            windows=windows,
        )
        self.scheduler = Scheduler(
            self.config,
            max_model_len=max_model_len,
            kv=self.kv,
            step_time=step_time,
            drafters=drafters,
            draft_model=draft_model,
        )
        self.checks = PlanChecks(self.scheduler)
        self.clock = clock or VirtualClock()
        self.executor = SimulatedExecutor(self.clock, step_time_s, vocab_size=VOCAB_SIZE)
        self.added: dict[str, AddRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.token_times_s: dict[str, list[float]] = {}
        self.finish_reasons: dict[str, list[FinishReason]] = {}
        self.num_cached: dict[str, int] = {}
        self.num_computed: dict[str, int] = {}
        self.num_drafted = self.num_accepted = 0
        self.plans: list[StepPlan] = []
        self.depth = depth
        self.in_flight: deque[StepPlan] = deque()
        self.shadow = ShadowCache(block_size, has_states=states is not None)
        self.holds: dict[str, Hold] = {}
        self.quarantined: list[str] = []
        """Key request id, of those whose blocks another engine reads or writes."""
        self.thinking: ThinkingLimit | None = None
        """Of requests that are added without their own."""
        self.known: set[str] = set()
        """Requests that the executor knows, without their end."""

    def add(
        self,
        request_id: str,
        prompt_len: int = 0,
        max_tokens: int = 4,
        *,
        prompt: Sequence[int] | None = None,
        eos_token_ids: Collection[int] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        kv_role: str | None = None,
        pooling: Pooling | None = None,
        thinking: ThinkingLimit | None = None,
        **service: Any,
    ) -> None:
        """Let a request arrive now.

        Args:
            kv_role: "send" where another engine is to have its prompt's blocks, "fetch" where
                another one has them. With states, its engine fetches a prompt before the scheduler
                sees its request.
            prompt: None takes `prompt_len` tokens that no other prompt has.
            eos_token_ids: at which it ends, as it may before `max_tokens`.
            pooling: how its prompt becomes a vector, with which it ends.
            service: fields of `ServiceParams`.
        """
        if kv_role == "fetch" and self.kv.transfers_whole:
            kv_role = None
        first = VOCAB_SIZE + len(self.added) * _LONGEST_PROMPT
        request = AddRequest(
            request_id=request_id,
            prompt_token_ids=token_array(
                range(first, first + prompt_len) if prompt is None else prompt
            ),
            params=SamplingParams(
                max_tokens=max_tokens,
                seed=0,
                temperature=0.0,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                thinking_limit=thinking or self.thinking,
            ),
            service=ServiceParams(**service),
            eos_token_ids=tuple(eos_token_ids),
            arrival_time_s=self.clock(),
            kv_transfer=_TRANSFERS[kv_role],
            pooling=pooling,
        )
        self.added[request_id] = request
        self.tokens[request_id] = []
        self.token_times_s[request_id] = []
        self.finish_reasons[request_id] = []
        self.num_cached[request_id] = self.num_computed[request_id] = 0
        self.take(self.scheduler.apply([request], self.clock()))

    def reconfigure(self, **settings: Any) -> None:
        """Change fields of `SchedulerConfig`."""
        changed = msgspec.structs.replace(self.config, **settings)
        self.config = changed.resolve(self.max_model_len)
        self.scheduler.reconfigure(self.config, self.clock())

    def abort(self, request_id: str) -> None:
        self.take(self.scheduler.apply([AbortRequest(request_id=request_id)], self.clock()))

    def plan(self) -> StepPlan | None:
        running = self.scheduler._queues.running.values()
        decoding = {r: r.next_due_s for r in running if self.is_stream(r)}
        early = set(self.scheduler._dispatch._preempted)  # when there was no step to be planned
        plan = self.scheduler.plan(self.clock())
        self.holds |= {hold.request_id: hold for hold in self.kv.holds.take_new()}
        if plan is None:
            self.shadow.move(self.kv.take_moves())
            return None
        self.plans.append(plan)
        self.checks.check(plan, self.in_flight, decoding, early)
        self.in_flight.append(plan)
        self.hear(plan)
        self.shadow.move(plan.moves)
        return plan

    def is_stream(self, request: Request) -> bool:
        """Whether its next token is due, by what it and who shares its blocks did."""
        if request.ends_in_flight or request.num_passed_over:
            return False
        num_computed = request.num_scheduled_tokens
        if not request.is_in_flight:
            num_computed = max(num_computed, self.kv.num_computed_tokens(request))
        is_output = num_computed >= request.num_prompt_tokens
        num_left = request.num_expected_tokens - num_computed
        return is_output and 1 <= num_left <= 1 + request.num_given_tokens

    def run(
        self,
        plan: StepPlan,
        failing: Collection[str] = (),
        *,
        out_of_memory: bool = False,
        counted: Mapping[str, int] | None = None,
        cuts: tuple[RowCut, ...] = (),
        foreseen_s: float | None = None,
    ) -> None:
        """Compute the oldest step in flight; of the requests in `failing` nothing, though it spoils
        their blocks. Where some fail, the steps behind it are withdrawn.

        Args:
            counted: how many tokens count of a chunk where that is another number than it has; key
                request id.
            cuts: how rows were dropped; `counted` names their chunks.
            foreseen_s: as in `StepResult`.
        """
        assert plan is self.in_flight.popleft()
        if failing or out_of_memory:
            self.withdraw()
        computed = [
            self.counted(chunk, (counted or {}).get(chunk.request_id, chunk.num_tokens))
            for chunk in plan.chunks
            if chunk.request_id not in failing and self.is_valid(chunk)
        ]
        for chunk in computed:
            self.shadow.read(chunk, self.token_ids(chunk.request_id), self.salt(chunk.request_id))
            for table in chunk.window_block_ids:
                assert len(table) * self.kv.block_size >= chunk.end, "rows without blocks"
        for chunk in plan.chunks:
            self.shadow.spoil(chunk)
        results = {chunk.request_id: self.compute(chunk) for chunk in computed}
        self.executor.submit(plan)
        seconds = self.executor.collect().seconds
        unread = dict.fromkeys([chunk.request_id for chunk in plan.chunks], GARBAGE)
        result = StepResult(
            step_id=plan.step_id,
            seconds=seconds,
            chunks={**unread, **results} if not failing else results,
            faults=dict.fromkeys(failing, Fault("boom", out_of_memory)),
            ran_out_of_memory=out_of_memory,
            cuts=cuts,
            foreseen_s=foreseen_s,
        )
        self.take(self.scheduler.commit(result, self.clock()))

    def run_first_rows(
        self, num_rows: int, cuts: tuple[RowCut, ...], foreseen_s: float | None = None
    ) -> None:
        """Compute the oldest step in flight; only its first `num_rows` rows count."""
        plan = self.in_flight[0]
        kept = {chunk.request_id: chunk.num_tokens for chunk in plan.first_rows(num_rows).chunks}
        counted = {chunk.request_id: kept.get(chunk.request_id, 0) for chunk in plan.chunks}
        self.run(plan, counted=counted, cuts=cuts, foreseen_s=foreseen_s)

    def withdraw(self) -> None:
        """What an engine does with the steps behind one that failed."""
        while self.in_flight:
            for chunk in self.in_flight.pop().chunks:
                self.shadow.spoil(chunk)
            self.take(self.scheduler.withdraw())

    def is_valid(self, chunk: ScheduledChunk) -> bool:
        """Whether the request still runs, and has the tokens that the chunk was planned for."""
        request = self.scheduler._queues.running.get(chunk.request_id)
        is_passed_over = request is not None and request.num_passed_over > 0
        return not (self.finish_reasons[chunk.request_id] or is_passed_over)

    def counted(self, chunk: ScheduledChunk, num_tokens: int) -> ScheduledChunk:
        """A chunk with fewer counted tokens than it has, or more, as if drafts were right."""
        if num_tokens == chunk.num_tokens:
            return chunk
        num_samples = max(0, chunk.num_samples + num_tokens - chunk.num_tokens)
        return msgspec.structs.replace(
            chunk, num_tokens=num_tokens, num_samples=num_samples, draft_token_ids=()
        )

    def compute(self, chunk: ScheduledChunk) -> ChunkResult:
        token_ids = self.token_ids(chunk.request_id)
        if chunk.draft_token_ids:
            return self.verify(chunk, [*token_ids, *chunk.draft_token_ids])
        num_known = len(token_ids)
        for _ in range(chunk.num_samples):
            token_ids.append(greedy_token(token_ids))
        self.shadow.write(chunk, token_ids, self.salt(chunk.request_id))
        self.num_computed[chunk.request_id] += chunk.num_tokens
        return ChunkResult(chunk.num_tokens, tuple(token_ids[num_known:]))

    def verify(self, chunk: ScheduledChunk, token_ids: list[int]) -> ChunkResult:
        """As an executor does: all rows are written, those behind a wrong draft for nothing."""
        assert len(token_ids) == chunk.end
        self.shadow.write(chunk, token_ids, self.salt(chunk.request_id))
        ends = range(chunk.end - chunk.num_samples + 1, chunk.end + 1)
        result = chunk.result([greedy_token(token_ids[:end]) for end in ends])
        self.num_computed[chunk.request_id] += result.num_tokens
        self.num_drafted += len(chunk.draft_token_ids)
        self.num_accepted += len(result.token_ids) - 1
        return result

    def hear(self, plan: StepPlan) -> None:
        """Note new and ended requests, as an executor does."""
        self.known.difference_update(plan.ended_requests)
        self.known.update(request.request_id for request in plan.new_requests)
        assert self.known.issuperset(chunk.request_id for chunk in plan.chunks)

    def token_ids(self, request_id: str) -> list[int]:
        """Prompt and output so far."""
        return [*self.added[request_id].prompt_token_ids, *self.tokens[request_id]]

    def salt(self, request_id: str) -> str | None:
        return self.added[request_id].service.cache_salt

    def arrive(
        self, request_id: str, num_tokens: int, *, is_over: bool, read_s: float = 0.0
    ) -> None:
        """Have a transfer write a prompt's blocks up to a token, and perhaps end."""
        hold, token_ids = self.holds[request_id], self.token_ids(request_id)[:num_tokens]
        self.shadow.fill(hold.block_ids, hold.num_arrived, token_ids, self.salt(request_id))
        if is_over:
            del self.holds[request_id]
        event = BlocksArrived(
            request_id=request_id, num_tokens=num_tokens, read_s=read_s, is_over=is_over
        )
        self.take(self.scheduler.apply([event], self.clock()))

    def read_sent(self, request_id: str) -> None:
        """Have another engine read what is computed of a prompt that it is to have."""
        hold = self.holds[request_id]
        computed = self.token_ids(request_id)[: hold.num_computed_tokens]
        self.shadow.check(hold.block_ids, computed, self.salt(request_id))

    def end_transfer(self, request_id: str) -> None:
        """The step's result, in any case."""
        hold = self.holds[request_id]
        if isinstance(hold.transfer, FetchBlocks):
            self.arrive(request_id, hold.num_arrived, is_over=True)
        else:
            self.read_sent(request_id)
            del self.holds[request_id]
            self.kv.holds.let_go(request_id)

    def quarantine(self, request_id: str) -> None:
        """End a transfer that may still write to blocks, and have it write to them."""
        hold = self.holds[request_id]
        left = hold.blocks(hold.num_arrived)
        if self.kv.quarantine.begin(request_id):
            self.shadow.move(self.kv.take_moves())  # as the next plan would have
            self.quarantined.append(request_id)
            self.shadow.overwrite(left)
            self.end_transfer(request_id)

    def end_quarantine(self, request_id: str) -> None:
        self.quarantined.remove(request_id)
        self.kv.quarantine.end(request_id)

    def step(self) -> StepPlan | None:
        """Plan as far ahead as may be, and run the oldest step."""
        while len(self.in_flight) < self.depth and self.plan() is not None:
            pass
        if not self.in_flight:
            return None
        oldest = self.in_flight[0]
        self.run(oldest)
        return oldest

    def drain(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            if self.step() is None:
                assert self.holds or self.quarantined, "there is work, but no step"
                if self.quarantined:
                    self.end_quarantine(self.quarantined[0])
                else:
                    self.end_transfer(min(self.holds))
        raise AssertionError("the scheduler does not come to an end")

    def take(self, outputs: list[RequestOutput]) -> None:
        assert not self.scheduler.containment.num_errors, "bookkeeping erred: see the log"
        for output in outputs:
            assert not self.finish_reasons[output.request_id], "an output after the end"
            self.tokens[output.request_id] += output.new_token_ids
            self.token_times_s[output.request_id] += [self.clock()] * len(output.new_token_ids)
            self.num_cached[output.request_id] = max(
                output.num_cached_tokens, self.num_cached[output.request_id]
            )
            if output.finish_reason is not None:
                self.finish_reasons[output.request_id].append(output.finish_reason)

    def check_skipped(self, request_id: str) -> None:
        """What was not computed was said to be cached; what is to be scored was computed."""
        request, num_cached = self.added[request_id], self.num_cached[request_id]
        num_prompt, num_output = len(request.prompt_token_ids), len(self.tokens[request_id])
        if num_output:
            assert num_cached < num_prompt
        num_known = num_cached + self.num_computed[request_id]
        if any(request_id in plan.preempted for plan in self.plans):
            num_known = num_prompt + num_output  # no more is said to be cached from then on
        if num_output:
            limit = request.params.thinking_limit  # tokens given last may be the last of all
            num_given = 0 if limit is None else len(limit.forced)
            assert num_known >= num_prompt + num_output - 1 - num_given
        reads_all = request.params.prompt_logprobs is not None or request.pooling == "mean"
        if reads_all or not self.kv._is_sharing:
            assert not num_cached
        if request.pooling and self.finish_reasons[request_id] == [FinishReason.STOP]:
            assert num_cached < num_prompt <= num_known

    def expected_tokens(self, request_id: str) -> list[int]:
        """What the request gets when it runs undisturbed."""
        request = self.added[request_id]
        if request.pooling is not None:
            return []
        token_ids = list(request.prompt_token_ids)
        assert request.params.max_tokens is not None
        count = min(request.params.max_tokens, self.max_model_len - len(token_ids))
        num_prompt_tokens = len(token_ids)
        thoughts = Thoughts(request.params.thinking_limit)
        while len(token_ids) < num_prompt_tokens + count:
            token_ids.append(greedy_token(token_ids))
            if token_ids[-1] in request.eos_token_ids:
                break
            given = thoughts.after(token_ids[num_prompt_tokens:])
            end = next((i for i, one in enumerate(given) if one in request.eos_token_ids), None)
            token_ids += given if end is None else given[: end + 1]
            if end is not None:
                break
        return token_ids[num_prompt_tokens : num_prompt_tokens + count]


def coming(request: Request, count: int) -> list[int]:
    """The tokens that a request has next."""
    token_ids = list(request.token_ids)
    for _ in range(count):
        token_ids.append(greedy_token(token_ids))
    return token_ids[-count:]


def greedy_token(token_ids: list[int]) -> int:
    """What a made-up model says after these tokens."""
    return zlib.crc32(array("q", token_ids).tobytes()) % VOCAB_SIZE
