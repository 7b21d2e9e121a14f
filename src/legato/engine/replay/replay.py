"""Replays a part of a trace on the scheduler that planned it, with one thing taken out.

A step that is planned as it was recorded takes its recorded time; any other takes what a fit to the
recorded steps forecasts. Prompts are made up: their lengths and their cache hits are recorded.
"""

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import msgspec

from legato.core.config import SchedulerConfig
from legato.core.plan import ChunkResult, ScheduledChunk, StepPlan, StepResult
from legato.core.request import AbortRequest, AddRequest, Event
from legato.core.sampling_params import SamplingParams
from legato.core.slo import P99, ServiceParams, SloClass
from legato.core.step_record import ChunkRecord, RequestArrived
from legato.core.token_ids import token_array
from legato.engine.loop.engine_loop import EngineLoop
from legato.engine.replay.window import (
    HeldRequest,
    Signature,
    Window,
    extra_s,
    is_stream,
    shape_of,
    signature,
)
from legato.executor.simulated import SimulatedExecutor, VirtualClock
from legato.kv.manager import KVCacheManager
from legato.scheduler.cost_fit import MeasuredStep, fit
from legato.scheduler.scheduler import Scheduler
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel

_LONGEST_TURNAROUND_S = 0.25
"""Longer times between two steps are idle ones."""
_FEWEST_MEASURED = 4


class Token(NamedTuple):
    """A token, by its request and its place in the output; the gap before token 0 is its TTFT."""

    request_id: str
    place: int


class Without(NamedTuple):
    """What is taken out, or set otherwise; nothing by default."""

    request_id: str | None = None
    tenant: str | None = None
    config: SchedulerConfig | None = None
    has_interruptions: bool = True


class Replayed(NamedTuple):
    """A replay.

    Attributes:
        wait_s: the token's gap, or its TTFT; None if it has not come within the steps.
        num_late: gaps beyond the promise of their request's class.
        num_steps, num_recorded: steps until the token, and those of them planned as recorded.
        plans: what each step computed.
    """

    wait_s: float | None
    num_late: int
    num_steps: int
    num_recorded: int
    plans: list[Signature]


class Replay:
    """Replays the steps of a window from one of them on, until a token comes.

    Args:
        first: index of the first step.
        token: ends a replay.

    Attributes:
        begins_s: when the first of its steps could begin.
    """

    def __init__(self, window: Window, first: int, token: Token) -> None:
        self._window, self._token = window, token
        self._states = window.states_at(first)
        self._before, self._steps = window.steps[:first], window.steps[first:]
        self.begins_s = self._before[-1].ended_s if first else self._steps[0].planned_s
        # Where the first chunk began: a request also uses what is computed after its admission.
        self._hits: dict[str, int] = {}
        for step in reversed(self._steps):
            self._hits |= {chunk.request_id: chunk.start for chunk in step.chunks}
        self._wait_for_shared_blocks()
        measured = [(shape_of(step), step.seconds) for step in window.steps if not extra_s(step)]
        if len(measured) < _FEWEST_MEASURED:
            raise ValueError("too few of its steps were measured")
        self._costs = fit(measured)
        self._prior: list[MeasuredStep] = [
            (shape_of(step), step.predicted_s)
            for step in window.steps
            if step.predicted_s is not None and self._steps[0].predicted_s is not None
        ]
        between_s = [max(0.0, two.planned_s - one.ended_s) for one, two in pairwise(window.steps)]
        usual_s = [seconds for seconds in between_s if seconds < _LONGEST_TURNAROUND_S]
        self._turnaround_s = median(usual_s) if usual_s else 0.0
        self._recorded: dict[Signature, float] = {}  # value: seconds from its planning on
        self._extra_s: dict[Signature, float] = {}
        self._after_s: dict[Signature, float] = {}  # value: from its end to the next planning
        free_s = self.begins_s  # with two steps in flight, a step is planned before it begins
        for step, following_s in zip(self._steps, [*between_s[first:], 0.0], strict=True):
            name = signature(step.chunks)
            self._recorded[name] = max(1e-9, step.ended_s - max(step.planned_s, free_s))
            free_s = step.ended_s
            self._extra_s[name] = extra_s(step)
            if following_s < _LONGEST_TURNAROUND_S:
                self._after_s[name] = following_s
        self._first_after_s = between_s[first - 1] if first else 0.0

    def _wait_for_shared_blocks(self) -> None:
        """Let requests come with their first chunk if another computed their blocks before it."""
        waiting: dict[str, int] = {}  # value: tokens computed at its admission
        for step in self._steps:
            for chunk in step.chunks:
                num_tokens = waiting.pop(chunk.request_id, chunk.start)
                if chunk.start > num_tokens and chunk.request_id in self._states:
                    self._states[chunk.request_id].ready_s = step.planned_s
            begun = {chunk.request_id for chunk in step.chunks}
            waiting |= {one: num for one, num in step.admitted.items() if one not in begun}

    @property
    def recorded_plans(self) -> list[Signature]:
        """What each recorded step computed."""
        return [signature(step.chunks) for step in self._steps]

    def run(self, without: Without, most_steps: int) -> Replayed:
        """Replay without something, in at most so many steps."""
        config = without.config or self._window.basis.scheduler
        states = [s for s in self._states.values() if self._stays(s.arrived, without)]
        live = [s for s in states if s.num_computed_tokens]
        coming = deque(
            sorted(
                (s for s in states if not s.num_computed_tokens),
                key=lambda s: (_comes_s(s), s.ready_s),
            )
        )
        leaving = deque(
            sorted(
                (s.cut_s, s.arrived.request_id)
                for s in states
                if s.cut_s is not None and s.arrived.request_id != self._token.request_id
            )
        )
        clock = VirtualClock()
        clock.advance_to(self.begins_s)
        scheduler, kv = self._scheduler(config, live, clock.now_s)
        plans: list[Signature] = []
        step_time_s = self._step_time(clock, plans, has_interruptions=without.has_interruptions)
        depth = config.num_steps_in_flight or 1
        loop = EngineLoop(scheduler, kv, SimulatedExecutor(clock, step_time_s, depth=depth), clock)
        came_s = {s.arrived.request_id: [self.begins_s] for s in live if is_stream(s)}
        # Key request id; value the place in the output of the first token in `came_s`.
        firsts = {s.arrived.request_id: s.num_output_tokens - is_stream(s) for s in states}
        after_s, num_idle = self._first_after_s, 0
        while len(plans) < most_steps and (coming or loop.has_work):
            if not loop.has_work:
                clock.advance_to(_comes_s(coming[0]))
                after_s = self._turnaround_s
            ended_s, planned_s = clock.now_s, clock.now_s + after_s
            events: list[Event] = []
            while coming and (_comes_s(coming[0]) <= ended_s or coming[0].ready_s <= planned_s):
                events.append(self._message(coming.popleft()))
            while leaving and leaving[0][0] <= planned_s:
                events.append(AbortRequest(request_id=leaving.popleft()[1]))
            clock.advance_to(planned_s)
            num_before = len(plans)
            for output in loop.step(events):
                times = came_s.setdefault(output.request_id, [])
                times += [clock.now_s] * len(output.new_token_ids)
            num_idle = 0 if len(plans) > num_before else num_idle + 1
            if num_idle > depth:  # nothing is in flight, and none of the requests can begin
                if not coming:
                    break
                clock.advance_to(_comes_s(coming[0]))
            after_s = self._after_s.get(plans[-1], self._turnaround_s) if plans else 0.0
            wanted = self._token.place - firsts.get(self._token.request_id, 0)
            if len(came_s.get(self._token.request_id, ())) > wanted:
                break
        return Replayed(
            wait_s=self._wait_s(came_s, firsts),
            num_late=self._num_late(came_s, config),
            num_steps=len(plans),
            num_recorded=sum(name in self._recorded for name in plans),
            plans=plans,
        )

    def _step_time(
        self, clock: VirtualClock, plans: list[Signature], *, has_interruptions: bool
    ) -> Callable[[StepPlan], float]:
        """Return what times steps, and appends what they compute to `plans`."""
        unpaid = deque((s.started_s, extra_s(s)) for s in self._steps if extra_s(s))

        def step_time_s(plan: StepPlan) -> float:
            chunks = [self._moved(chunk) for chunk in plan.chunks]
            name = signature(chunks)
            plans.append(name)
            is_recorded = name in self._recorded
            seconds = (
                self._recorded[name]
                if is_recorded
                else self._costs.seconds(StepShape.of_chunks(chunks))
            )
            away_s = 0.0
            while unpaid and unpaid[0][0] <= clock.now_s + seconds + away_s:
                away_s += unpaid.popleft()[1]
            if is_recorded:  # the recorded time has its own interruption
                return seconds if has_interruptions else seconds - self._extra_s[name]
            return seconds + away_s if has_interruptions else seconds

        return step_time_s

    def _stays(self, arrived: RequestArrived, without: Without) -> bool:
        if arrived.request_id == self._token.request_id:
            return True
        return arrived.request_id != without.request_id and arrived.tenant != without.tenant

    def _scheduler(
        self, config: SchedulerConfig, live: list[HeldRequest], now_s: float
    ) -> tuple[Scheduler, KVCacheManager]:
        """Return a scheduler that holds the live requests and has learned from earlier steps."""
        basis = self._window.basis
        kv = KVCacheManager(basis.num_blocks, basis.block_size, enable_prefix_caching=False)
        model = StepTimeModel()
        scheduler = Scheduler(
            _boundless(config, sum(s.num_computed_tokens + 1 for s in live)),
            max_model_len=basis.max_model_len,
            kv=kv,
            step_time=model,
        )
        if live:
            scheduler.apply([self._message(state) for state in live], now_s)
            plan = scheduler.plan(now_s)
            assert plan is not None
            states = {state.arrived.request_id: state for state in live}
            chunks = {
                chunk.request_id: ChunkResult(chunk.num_tokens, (0,))
                if is_stream(states[chunk.request_id])
                else ChunkResult(states[chunk.request_id].num_computed_tokens, ())
                for chunk in plan.chunks
            }
            result = StepResult(step_id=plan.step_id, seconds=0.0, chunks=chunks)
            scheduler.commit(result, now_s)
        model.begin_again(self._prior)
        for step in self._before:
            model.observe(shape_of(step), step.seconds, None, step.limit_s)
        scheduler.reconfigure(msgspec.structs.replace(config, speculative="off"), now_s)
        return scheduler, kv

    def _message(self, state: HeldRequest) -> AddRequest:
        """Return a live request at its present place, or an arriving one without its hit."""
        arrived = state.arrived
        num_tokens = arrived.num_prompt_tokens + state.num_output_tokens
        if is_stream(state):
            num_tokens -= 1  # its last token is sampled again
        if not state.num_computed_tokens:
            num_tokens -= self._hits.get(arrived.request_id, 0)
        num_left = state.num_final_tokens - state.num_output_tokens + is_stream(state)
        return AddRequest(
            request_id=arrived.request_id,
            prompt_token_ids=token_array([0]) * max(1, num_tokens),
            params=SamplingParams(max_tokens=max(1, num_left), temperature=0.0),
            service=ServiceParams(
                slo_class=arrived.slo_class, priority=arrived.priority, tenant=arrived.tenant
            ),
            arrival_time_s=arrived.arrived_s,
            is_rerun=True,  # it was not refused
        )

    def _moved(self, chunk: ScheduledChunk) -> ChunkRecord:
        """Return a planned chunk at its place behind the cached tokens."""
        state = self._states[chunk.request_id]
        hit = 0 if state.num_computed_tokens else self._hits.get(chunk.request_id, 0)
        return ChunkRecord(
            chunk.request_id,
            chunk.start + hit,
            chunk.num_tokens,
            chunk.num_samples,
            chunk.kind,
            chunk.ended_by,
        )

    def _wait_s(self, came_s: dict[str, list[float]], firsts: dict[str, int]) -> float | None:
        request_id, in_output = self._token
        times = came_s.get(request_id, [])
        place = in_output - firsts[request_id]
        if not 0 <= place < len(times):
            return None
        if in_output == 0:
            return times[0] - self._states[request_id].arrived.arrived_s
        return times[place] - times[place - 1] if place else None

    def _num_late(self, came_s: dict[str, list[float]], config: SchedulerConfig) -> int:
        num_late = 0
        for request_id, times in came_s.items():
            promise_s = config.classes[self._states[request_id].arrived.slo_class].itl_s
            if promise_s is not None:
                gaps = (b - a for a, b in pairwise(times))
                num_late += sum(gap > promise_s for gap in gaps)
        return num_late


def _comes_s(state: HeldRequest) -> float:
    """Return when a request came; with a grammar, when that was compiled."""
    arrived = state.arrived
    return arrived.arrived_s if state.ready_s == arrived.taken_s else state.ready_s


def _boundless(config: SchedulerConfig, num_tokens: int) -> SchedulerConfig:
    """Return settings under which all live requests are computed in one step."""
    return msgspec.structs.replace(
        config,
        itl_slo_s=None,
        itl_slo_quantile=P99,
        tpot_slo_s=None,
        ttft_slo_s=None,
        slo_classes=dict.fromkeys(config.slo_classes, SloClass()),
        bounds_gaps=False,
        shed_load=False,
        max_num_batched_tokens=(1 << 31) - 1,
        max_num_seqs=max(1, num_tokens),
        admission_optimism=1.0,
        policy="stall-free",
        prefill_order="fcfs",
        enable_chunked_prefill=True,
        speculative="off",
    )
