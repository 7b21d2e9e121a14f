"""Plans again after a plan that raised, without the request that makes planning raise.

A plan changes requests, queues and the cache as it is made. Nothing is rolled back step by step,
since the error may have come anywhere. Instead, once no step is in flight, the state is restored
that each plan may begin from:

    each running request expects exactly its computed tokens and the next one;
    each waiting request is in its queue, at the place of its rank, and has no blocks;
    no step names blocks or state slots.

Admissions and preemptions of the failed plan stay: these requests are only running or waiting.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from legato.core.containment import Containment
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.plan import BlockMove, Fault, StepPlan
from legato.core.request import Request
from legato.kv.manager import KVCacheManager
from legato.scheduler.dispatch import Dispatch
from legato.scheduler.queues import Queues

_MOST_ENDED = 8
"""Most requests that end so that one step can be planned."""


class Replanned(NamedTuple):
    """A plan after a failed one.

    Attributes:
        outputs: of requests that ended.
        moves: copies of earlier plans, to be made before those of `plan`.
    """

    plan: StepPlan | None
    outputs: list[RequestOutput]
    moves: tuple[BlockMove, ...]


class Replanning:
    """Takes back plans, and finds the requests that make them raise.

    Args:
        plan: see `Scheduler.plan`.
        end: releases all that a request holds.
        requests: all that have not ended, in order of arrival; key request id.

    Attributes:
        is_due: whether the bookkeeping of a step raised. Then no step is planned before those in
            flight have landed, and then `plan_again` plans it.
    """

    def __init__(
        self,
        plan: Callable[[float], StepPlan | None],
        end: Callable[[Request], object],
        requests: Mapping[str, Request],
        queues: Queues,
        kv: KVCacheManager,
        dispatch: Dispatch,
        containment: Containment,
    ) -> None:
        self._plan = plan
        self._end = end
        self._requests = requests
        self._queues = queues
        self._kv = kv
        self._dispatch = dispatch
        self._containment = containment
        self._outputs: list[RequestOutput] = []
        self._moves: tuple[BlockMove, ...] = ()
        self.is_due = False

    def require(self, _: Exception) -> None:
        """Note that the scheduler's state must be restored before the next plan."""
        self.is_due = True

    def withdraw(self) -> list[RequestOutput]:
        """See `Scheduler.withdraw`."""
        outputs: list[RequestOutput] = []
        for chunk in self._dispatch.withdraw().chunks:
            request = self._queues.running.get(chunk.request_id)
            if request is None:
                continue
            if request.num_passed_over:
                request.pass_over()
            else:
                request.num_scheduled_tokens -= chunk.num_tokens
                request.num_expected_tokens -= chunk.num_samples
            if request.finish_reason is not None and not request.is_in_flight:
                outputs.append(ended(request.request_id, request.finish_reason))
                self._end(request)
        return outputs

    def plan_again(self, now_s: float) -> Replanned:
        """Plan a step; end the requests that make planning raise. No step may be in flight.

        Raises what the last plan raised, if no single request is to blame, or too many are.
        """
        plan = self._plan_without_culprits(now_s)
        self.is_due = False
        replanned = Replanned(plan, self._outputs, self._moves)
        self._outputs, self._moves = [], ()
        return replanned

    def _plan_without_culprits(self, now_s: float) -> StepPlan | None:
        for num_ended in range(_MOST_ENDED + 1):
            self._restore()
            try:
                return self._plan(now_s)
            except Exception as error:
                self._containment.note("the plan of a step", error)
                culprit = self._culprit(now_s)
                if culprit is None or num_ended == _MOST_ENDED:
                    raise
                if culprit.request_id in self._queues:
                    self._fail(culprit, error)
        raise AssertionError("the last attempt returns or raises")

    def _restore(self) -> None:
        """Restore the state that a plan begins from."""
        self._moves += self._dispatch.take_back()
        for request in [*self._queues.running.values()]:
            request.settle()
            if request.finish_reason is not None:
                self._outputs.append(ended(request.request_id, request.finish_reason))
                self._end(request)
        for request in self._queues.take_waiting():
            with self._containment.containing(f"the release of {request.request_id}"):
                self._kv.release(request)
            self.wait(request)
        for request in [*self._requests.values()]:
            if request.request_id not in self._queues:
                self._fail(request, RuntimeError("the request was lost"))

    def _culprit(self, now_s: float) -> Request | None:
        """Return the request without which older requests can be planned; None if there is none.

        Of requests that only together make a plan raise, it is the newest one.
        """
        self._restore()
        running = self._queues.running
        waiting = [one for one in self._requests.values() if one.request_id not in running]
        requests = [*running.values(), *waiting]
        num_sound, num_raising = -1, len(requests)
        while num_raising - num_sound > 1:
            middle = (num_sound + num_raising) // 2
            if self._can_plan(requests[:middle], requests[middle:], now_s):
                num_sound = middle
            else:
                num_raising = middle
        return requests[num_raising - 1] if num_raising else None

    def _can_plan(self, kept: list[Request], others: list[Request], now_s: float) -> bool:
        """Try to plan a step of the first of all requests; take the plan back.

        Args:
            others: the other requests, which leave the queues meanwhile.
        """
        queues = self._queues
        places = {request.request_id: place for place, request in enumerate([*kept, *others])}
        running = [
            queues.running.pop(r.request_id) for r in others if r.request_id in queues.running
        ]
        waiting = [request for request in others if request.request_id in queues]
        for request in waiting:
            queues.remove(request)
        try:
            self._plan(now_s)
        except Exception:
            return False
        else:
            return True
        finally:
            queues.running.update((request.request_id, request) for request in running)
            for request_id in sorted(queues.running, key=places.__getitem__):
                queues.running.move_to_end(request_id)
            for request in waiting:
                if request.request_id in self._requests:
                    self.wait(request)
            self._restore()

    def wait(self, request: Request) -> None:
        """Put a request into its queue; if that raises, end it when `plan_again` is called."""
        try:
            self._queues.add(request)
        except Exception as error:
            self._containment.note(f"the wait of {request.request_id}", error)
            self._fail(request, error)
            self.is_due = True

    def leave(self, request: Request) -> None:
        """Remove a request from its queue, if it is in one."""
        if request.request_id in self._queues:
            self._queues.remove(request)

    def _fail(self, request: Request, error: Exception) -> None:
        self._end(request)
        self._outputs.append(failed(request.request_id, error))


def ended(request_id: str, reason: FinishReason) -> RequestOutput:
    """Return the last output of a request that ends without an error."""
    return RequestOutput(request_id=request_id, finish_reason=reason)


def faulted(request: Request, fault: Fault) -> RequestOutput:
    """End a request that could not be computed; return its last output."""
    request.finish_reason = FinishReason.ERROR
    return RequestOutput(
        request_id=request.request_id,
        finish_reason=FinishReason.ERROR,
        error=fault.error,
        is_asked_for=fault.is_asked_for,
    )


def failed(request_id: str, error: Exception) -> RequestOutput:
    """Return the last output of a request whose bookkeeping raised."""
    return RequestOutput(
        request_id=request_id,
        finish_reason=FinishReason.ERROR,
        error=f"internal error: {type(error).__name__}: {error}",
    )
