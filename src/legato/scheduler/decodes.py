"""The decodes of a step: the next token of each running stream."""

from collections.abc import Sequence, Set

from legato.core.request import Request
from legato.kv.manager import KVCacheManager
from legato.scheduler.admission import Admission
from legato.scheduler.budget import UNLIMITED, StepBudget
from legato.scheduler.queues import Queues
from legato.scheduler.step import Step


def divided(running: Sequence[Request], kv: KVCacheManager) -> tuple[list[Request], list[Request]]:
    """Return the streams among running requests, and the requests that still have prompt left.

    A prompt skips tokens that other requests have computed since.
    """
    streams: list[Request] = []
    begun: list[Request] = []
    for request in running:
        is_stream = request.is_stream
        if not is_stream:
            request.catch_up(kv.num_computed_tokens(request))
            is_stream = request.is_stream
        (streams if is_stream else begun).append(request)
    return streams, begun


class Decodes:
    """Begins a step with the streams' next tokens; the first one due sets the step's limit.

    If promised tokens are due, best-effort streams join as far as they fit into the time: before
    prompts while their tenant has had less than the prompts', else after them. One that has waited
    as long as any request may joins in any case.

    Args:
        streams: running requests that wait for their next token, in order of admission.
        begins_s: when the step can begin: the end of the steps in flight.
        idle_limit_s: how long the step may take if no token is due.
        may_hurry: whether prompts may wait for the next step; False after a step in which they did.
        max_wait_s: longest time without a token for a best-effort stream.
    """

    def __init__(
        self,
        streams: Sequence[Request],
        queues: Queues,
        admission: Admission,
        kv: KVCacheManager,
        budget: StepBudget,
        *,
        begins_s: float,
        idle_limit_s: float,
        may_hurry: bool,
        max_wait_s: float,
    ) -> None:
        self._all = streams
        # Streams whose tokens were given up to the next that is sampled.
        self._given = [r for r in streams if r.num_given_tokens and r.num_remaining_tokens > 1]
        self._streams = [r for r in streams if r not in self._given] if self._given else streams
        self._queues = queues
        self._admission = admission
        self._kv = kv
        self._budget = budget
        self._begins_s = begins_s
        self._idle_limit_s = idle_limit_s
        self._may_hurry = may_hurry
        self._max_wait_s = max_wait_s
        self._yielding: list[Request] | None = None  # best-effort streams left out; None: not begun

    @property
    def must_wait(self) -> bool:
        """Whether this step must wait for a step in flight: for a token's value or for blocks.

        No request is preempted while a step is in flight: that step may compute it.
        """
        return (
            any(request.waits_for_token for request in self._all)
            or not self._reserve(self._all)
            or bool(self._admission.yielding())
        )

    def drafting(self, step: Step) -> list[Request]:
        """Return the streams with a decode in the step that have generated a token before."""
        ids = step.request_ids
        return [r for r in self._streams if r.request_id in ids and r.num_output_tokens]

    def begin(self) -> Step:
        """Begin a step with the next token of every stream, even beyond the budget."""
        assert self._yielding is None, "a stream has one token a step"
        self._yielding = []
        step = self._begun()
        given = self._with_room(self._given, step.request_ids)
        for place, request in enumerate(filter(self._is_running, given)):
            step.add_given(request, len(self._yielding) + len(given) - place - 1)
        return step

    def _begun(self) -> Step:
        promised = self._with_room([r for r in self._streams if not r.is_best_effort])
        owed = [r for r in self._given if not r.is_best_effort]
        due_s = min([request.next_due_s for request in [*promised, *owed]], default=UNLIMITED)
        is_due = due_s < UNLIMITED
        limit_s = due_s - self._begins_s if is_due else self._idle_limit_s
        step = Step(self._kv, self._budget, limit_s=limit_s, is_due=is_due)
        step.add_decodes(promised)
        best_effort = [r for r in self._streams if r.is_best_effort and self._is_running(r)]
        if not is_due:
            self._add(step, best_effort)
            return step
        best_effort.sort(key=self._last_s)
        if best_effort and self._begins_s - self._last_s(best_effort[0]) > self._max_wait_s:
            self._add(step, [best_effort.pop(0)])
        least = self._queues.least()
        first, later = list[Request](), list[Request]()
        for request in filter(self._is_running, best_effort):  # others may have been preempted
            tenant = self._queues.tenant_of_running(request.request_id)
            is_first = least is None or tenant.counter_s <= least.counter_s
            (first if is_first else later).append(request)
        self._yielding = [*self._add_fitting(step, first), *later]
        step.is_for_streams = self._may_hurry and self._begins_late(step)
        return step

    def begin_without(self) -> Step:
        """Begin a step for prompts alone, whose time has no limit."""
        return Step(self._kv, self._budget)

    def add_yielding(self, step: Step) -> None:
        """Add the best-effort streams that were left out, as far as there is time."""
        self._add_fitting(step, self._yielding or ())

    def _begins_late(self, step: Step) -> bool:
        """Whether the decodes leave nothing of the limit, but something of a whole promise.

        Prompts then wait for the next step, which begins in time.
        """
        if step.ends_within(step.limit_s):
            return False
        return step.ends_within(min(request.promise_s for request in self._all))

    def _add_fitting(self, step: Step, streams: Sequence[Request]) -> list[Request]:
        """Add the best-effort streams for which there is time; return the others."""
        rest = [request for request in streams if self._is_running(request)]
        left_out: list[Request] = []
        while rest:
            num_fitting = step.num_fitting(rest)
            self._add(step, rest[:num_fitting])
            left_out += rest[num_fitting : num_fitting + 1]
            rest = rest[num_fitting + 1 :]
        return left_out

    @staticmethod
    def _last_s(request: Request) -> float:
        return request.last_expected_s or 0.0

    def _add(self, step: Step, requests: list[Request]) -> None:
        step.add_decodes(self._with_room(requests, step.request_ids))

    def _with_room(self, requests: list[Request], spared: Set[str] = frozenset()) -> list[Request]:
        """Return the requests that have blocks for their next tokens.

        These are all that were not preempted for others.

        Args:
            spared: ids of requests that are not preempted.
        """
        if not self._admission.preempted and self._reserve(requests):
            return requests
        kept: list[Request] = []
        spared = set(spared)
        for request in requests:
            if request.num_expected_tokens > request.num_reserved_tokens:
                self._admission.preempt_for(request, spared)
            if self._is_running(request):
                spared.add(request.request_id)
                kept.append(request)
        return kept

    def _reserve(self, requests: Sequence[Request]) -> bool:
        """Reserve blocks for the requests' next tokens; False if there were not enough."""
        lacking = [r for r in requests if r.num_expected_tokens > r.num_reserved_tokens]
        return all(map(self._kv.reserve, lacking))

    def _is_running(self, request: Request) -> bool:
        return request.request_id in self._queues.running
