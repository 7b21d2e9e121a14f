"""Dispatch: the plans, steps in flight and requests that the executor has been given."""

import math
from collections import deque
from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple

from legato.core.plan import BlockMove, StepPlan, StepResult
from legato.core.request import Request
from legato.core.step_record import DraftsEndedBy, Obstacle, ShortHit
from legato.kv.manager import KVCacheManager
from legato.scheduler.admission import Admission
from legato.scheduler.budget import UNLIMITED
from legato.scheduler.step import Step
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel


class Flight(NamedTuple):
    """A planned step that has not landed.

    Attributes:
        planned_s: time of planning.
        ends_s: its expected end, the model's margin included, so that the next step is in time even
            if this one is late.
        drafting_s, first_blocks: as in `Step`.
    """

    plan: StepPlan
    shape: StepShape
    planned_s: float
    ends_s: float
    drafting_s: float
    first_blocks: dict[int, str]


class Dispatch:
    """Makes plans of built steps, and follows each until its result or its withdrawal.

    Args:
        step_time: predicts when a step ends, and learns from its result.
    """

    def __init__(self, kv: KVCacheManager, step_time: StepTimeModel) -> None:
        self._kv = kv
        self._step_time = step_time
        self._in_flight: deque[Flight] = deque()
        self._landed_s = -math.inf  # end of the last step
        self._later_s = 0.0  # from `record_delivery`, for the next step that is observed
        self._known_to_executor: set[str] = set()
        self._to_introduce_again: set[str] = set()  # known, perhaps: their first plan was withdrawn
        self._ended: list[str] = []  # request ids that the next plan ends in the executor
        # Since the last step. A request that waits for remote blocks is admitted without a chunk.
        self._admitted: dict[str, int] = {}
        self._short_hits: dict[str, ShortHit] = {}
        self._preempted: list[str] = []
        self._moves: tuple[BlockMove, ...] = ()  # taken for a plan that is not made yet
        self._num_steps = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_drafts(self) -> bool:
        """Whether a step in flight verifies drafts."""
        return any(flight.shape.num_draft_rows for flight in self._in_flight)

    @property
    def first_blocks(self) -> dict[int, str]:
        """As in `Step`, of all steps in flight."""
        found: dict[int, str] = {}
        for flight in self._in_flight:
            found |= flight.first_blocks
        return found

    @property
    def plans(self) -> list[StepPlan]:
        """Plans of the steps in flight, the oldest first."""
        return [flight.plan for flight in self._in_flight]

    def count_of(self, request_id: str) -> int:
        """Return how many chunks of a request are in flight."""
        return sum(c.request_id == request_id for plan in self.plans for c in plan.chunks)

    def look_ahead(self, now_s: float, running: Mapping[str, Request]) -> float:
        """Return when a step planned now can begin; set `in_flight_until_s` of requests.

        Args:
            running: key the request's id.
        """
        begins_s = now_s
        for flight in self._in_flight:
            begins_s = max(now_s, flight.ends_s)
            for chunk in flight.plan.chunks:
                request = running.get(chunk.request_id)
                if request is not None and chunk.num_samples:
                    request.in_flight_until_s = flight.ends_s
        return begins_s

    def note_changes(self, admission: Admission) -> None:
        """Record a step's admissions and preemptions for the next plan."""
        self._admitted |= admission.admitted
        self._short_hits |= admission.short_hits
        self._preempted += [request.request_id for request in admission.preempted]

    def plan(
        self,
        step: Step,
        running: Mapping[str, Request],
        *,
        held_by: Obstacle | None,
        drafts_ended_by: DraftsEndedBy | None,
        budget_tokens: int,
        now_s: float,
        begins_s: float,
    ) -> StepPlan:
        """Make the plan of a step that has chunks; the step is in flight from now on.

        If it raises, `take_back` returns the copies that the plan would have had, and nothing else
        has changed here.

        Args:
            running: key the request's id.
            held_by, drafts_ended_by, budget_tokens: as in `StepPlan`.
            begins_s: when the step can begin.
        """
        model = self._step_time
        predicted_s = model.seconds(step.shape) if model.is_known else None
        deadline = model.deadline(step.shape, step.limit_s) if step.is_due else None
        chunks = step.chunks
        if deadline is not None:  # the last rows are dropped
            chunks = sorted(chunks, key=lambda chunk: chunk.kind == "prefill")
        unsure = self._to_introduce_again
        known = self._known_to_executor - unsure if unsure else self._known_to_executor
        new = [chunk.request_id for chunk in chunks if chunk.request_id not in known]
        assigned = self._kv.assigned(chunks)
        self._moves += self._kv.take_moves()
        plan = StepPlan(
            step_id=self._num_steps,
            chunks=assigned,
            new_requests=tuple(running[request_id].message for request_id in new),
            ended_requests=tuple(self._ended),
            preempted=tuple(self._preempted),
            moves=self._moves,
            admitted=self._admitted,
            short_hits=self._short_hits,
            held_by=held_by,
            drafts_ended_by=drafts_ended_by,
            drafting_s=step.drafting_s,
            drafts_s=model.drafts_s(step.shape) if model.is_known else None,
            predicted_s=predicted_s,
            limit_s=None if step.limit_s == UNLIMITED else step.limit_s,
            budget_tokens=budget_tokens,
            deadline=deadline,
        )
        ends_s = (
            begins_s + step.drafting_s + (predicted_s or 0.0) * model.safety_factor(step.limit_s)
        )
        for request in step.becoming_streams:
            request.in_flight_since_s = ends_s
        flight = Flight(plan, step.shape, now_s, ends_s, step.drafting_s, step.first_blocks)
        self._kv.begin_step()
        self._in_flight.append(flight)
        self._num_steps += 1
        self._known_to_executor.update(new)
        unsure.difference_update(new)
        self._ended, self._preempted, self._moves = [], [], ()
        self._admitted, self._short_hits = {}, {}
        return plan

    def land(self, result: StepResult) -> Flight:
        """Remove the oldest step in flight, whose result this is."""
        flight = self._in_flight.popleft()
        assert flight.plan.step_id == result.step_id, "steps land in the order of their plans"
        if (
            result.faults
        ):  # perhaps the executor never got the plan; a later request may have its id
            ended = (
                one for one in flight.plan.ended_requests if one not in self._known_to_executor
            )
            self._ended = [*ended, *self._ended]
        return flight

    def learn(self, flight: Flight, result: StepResult, now_s: float) -> None:
        """Learn how long a step took that has landed."""
        begun_s = max(flight.planned_s, self._landed_s)
        self._landed_s = now_s
        if not (result.ran_out_of_memory or result.faults):
            delivered_s = now_s - begun_s - flight.drafting_s + self._later_s
            shape = flight.shape
            if result.cuts:
                shape = StepShape.computed(flight.plan, result.cuts)
            self._step_time.observe(shape, result.seconds, delivered_s, flight.plan.limit_s)
            deadline = flight.plan.deadline
            if deadline is not None:
                num_rows = result.cuts[-1].num_rows if result.cuts else flight.plan.num_tokens
                dropped = (flight.plan.num_tokens - num_rows) / flight.shape.num_prefill_tokens
                self._step_time.observe_deadline(deadline, delivered_s, result.foreseen_s, dropped)
            self._later_s = 0.0

    def withdraw(self) -> StepPlan:
        """Remove the newest step in flight, which the executor will not compute.

        The next plan introduces the same requests and ends the same ones: the executor may not have
        seen this one.
        """
        plan = self._in_flight.pop().plan
        new = {request.request_id for request in plan.new_requests}
        self._to_introduce_again |= new & self._known_to_executor
        self._ended = [*plan.ended_requests, *self._ended]
        self._admitted = plan.admitted | self._admitted
        self._short_hits = plan.short_hits | self._short_hits
        self._preempted = [*plan.preempted, *self._preempted]
        self._kv.withdraw(plan.chunks)
        return plan

    def take_back(self) -> tuple[BlockMove, ...]:
        """Withdraw all steps, which the executor does not have, and what a failed plan left behind.

        Returns:
            the copies that they would have had, in order.
        """
        moves = (*chain.from_iterable(plan.moves for plan in self.plans), *self._moves)
        while self._in_flight:
            self.withdraw()
        self._moves = ()
        self._kv.end_all_steps()
        return moves

    def record_delivery(self, delay_change_s: float) -> None:
        """Record the delivery of a step's tokens, as `Scheduler.record_delivery`."""
        self._later_s = delay_change_s

    def end(self, request_id: str) -> None:
        """End a request in the executor, with the next plan, if the executor knows it."""
        if request_id in self._known_to_executor:
            self._known_to_executor.discard(request_id)
            self._to_introduce_again.discard(request_id)
            self._ended.append(request_id)
