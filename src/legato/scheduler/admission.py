"""Admission and preemption: which requests run."""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence

from legato.core.config import SchedulerConfig
from legato.core.request import Request
from legato.core.step_record import Obstacle, ShortHit
from legato.kv.manager import KVCacheManager
from legato.kv.prefix_node import Way
from legato.scheduler.budget import UNLIMITED, StepBudget
from legato.scheduler.expected_ends import ExpectedEnds, OutputLengths, num_own_blocks
from legato.scheduler.queues import Queues
from legato.scheduler.step_shape import StepShape
from legato.scheduler.tenants import KEPT_PACE, KEPT_PLACES, Tenant, places_left

_HELD = 0.1
"""Share of the time for which a request without memory holds up other tenants."""
_PRESSED = 0.5
"""Share of the longest wait after which best-effort streams give way, even if they lose much."""
_LEAST_FEWER = 2
"""A tenant that runs something must run so many fewer than another, or they would take each other's
places in turn."""
_BEST_EFFORT_WAITS = 30.0
"""A best-effort request waits so many times as long as others before it holds up others."""


class Admission:
    """Admits waiting requests, and preempts running ones, within one step.

    A waiting request may run if there are a place, memory and pace for it beside the others, now
    and up to their expected ends. Running requests give way to it only if it may run without them.

    Args:
        running: the running requests whose streams go on after the steps in flight.
        now_s: time at which the step is planned.

    Attributes:
        admitted, short_hits: as in `StepRecord`.
        preempted: in order.
        too_slow: the first step of streams whose pace was not admitted.
        owed: the request that goes before all others. It has waited as long as any may, and its
            tenant runs less than another: the least of such tenants. If nothing of its tenant
            runs, it begins at the cost of promises.
    """

    def __init__(
        self,
        queues: Queues,
        kv: KVCacheManager,
        budget: StepBudget,
        lengths: OutputLengths,
        config: SchedulerConfig,
        running: Sequence[Request],
        now_s: float,
    ) -> None:
        assert config.max_num_seqs is not None
        self._queues = queues
        self._kv = kv
        self._budget = budget
        self._lengths = lengths
        self._most_running = config.max_num_seqs
        self._may_exceed_pace = config.shed_load
        self._max_wait_s = config.max_wait_s
        self._now_s = now_s
        self.admitted: dict[str, int] = {}
        self.short_hits: dict[str, ShortHit] = {}
        self.preempted: list[Request] = []
        self.too_slow: StepShape | None = None
        self._promised = StepShape()  # decodes of all running requests with a promise
        self._promise_s = UNLIMITED  # the tightest limit on a step among these
        self._ends: ExpectedEnds | None = None  # of the running requests, made on demand
        self._yielding: list[Request] | None = None
        self._note_pace(running)
        self.owed = self._find_owed()

    @property
    def num_short_tokens(self) -> int:
        """Tokens in cached blocks that admitted requests compute again."""
        return sum(hit.num_matched_tokens - hit.num_tokens for hit in self.short_hits.values())

    def obstacle(self, request: Request, without: Sequence[Request] = ()) -> Obstacle | None:
        """Return why the request must wait; None if it may run.

        Args:
            without: running requests that would be preempted for it.
        """
        obstacle = self._lacks(request, without)
        if obstacle is not None or request is self.owed or not self.leaves_room(request):
            return obstacle
        return "tenants" if self._lacks(request, without, for_others=True) else None

    def leaves_room(self, request: Request, *, num_more: int = 0) -> bool:
        """Whether the request must leave room for tenants that have less running.

        Args:
            num_more: 1 counts the request itself, if it waits.
        """
        tenants, tenant = self._queues.tenants, self._queues.tenant(request)
        return (
            len(tenants) > 1
            and not self._queues.is_urgent
            and not request.num_preemptions
            and tenants.may_come(tenant, self._now_s, self._most_running, num_more=num_more)
        )

    def has_waited(self, request: Request, share: float = 1.0) -> bool:
        """Whether a request has waited as long as any may: `max_wait_s`, or its TTFT promise.

        Args:
            share: of that time.
        """
        ttft_s = request.slo.ttft_s
        longest_s = self._max_wait_s if ttft_s is None else min(self._max_wait_s, ttft_s)
        return self._now_s - request.message.arrival_time_s > share * longest_s

    def holds_others(self, request: Request) -> bool:
        """Whether other tenants' requests wait, too, for a first one without memory.

        What comes free then stays free for it. They do so for a tenth of the time, in spans that
        grow with its wait: so one of them is long enough.
        """
        longest_s = self._max_wait_s
        if self._queues.tenant(request).is_best_effort:
            longest_s *= _BEST_EFFORT_WAITS
        periods = (self._now_s - request.message.arrival_time_s) / longest_s
        return periods >= 1.0 and periods < (1.0 + _HELD) * 2.0 ** math.floor(math.log2(periods))

    def _find_owed(self) -> Request | None:
        if len(self._queues.tenants) == 1:
            return None
        # Best-effort streams yield to promised requests anyway, and weigh a tenth: their number
        # would make a tenant that floods the engine one that runs less than another.
        promised = (one for one in self._queues.running_tenants if not one.is_best_effort)
        most = max((tenant.running_by_weight for tenant in promised), default=0.0)
        heads = [
            line[0]
            for tenant, line in self._queues.lines()
            if (not tenant.is_best_effort or self.holds_others(line[0]))
            and (
                not tenant.num_running
                or tenant.running_by_weight + (1.0 + _LEAST_FEWER) / tenant.weight <= most
            )
        ]
        waited = [request for request in heads if self.has_waited(request)]
        owed = min(waited, key=self._owed_rank, default=None)
        return owed if owed is None or not self._is_best_effort_turn(owed) else None

    def _is_best_effort_turn(self, owed: Request) -> bool:
        """Whether a best-effort request has the turn, and a place without any that yields.

        Promised requests that wait for each other would take each place that comes free.
        """
        request = self._queues.next_waiting()
        if request is None or not request.is_best_effort or owed.is_best_effort:
            return False
        return self._lacks(request) is None

    def _owed_rank(self, request: Request) -> tuple[float, float]:
        running = self._queues.tenant(request).running_by_weight
        return running, request.message.arrival_time_s

    def yielding(self) -> list[Request]:
        """Return the running requests that give way to the next one; none if that would not help.

        They are as few as possible, of tenants with more than their share: best-effort requests at
        once, others when the next one has waited too long.
        """
        if self._yielding is None:
            self._yielding = self._make_yielding()
        return self._yielding

    def _make_yielding(self) -> list[Request]:
        if not self._queues.running:
            return []
        request = self.owed or self._queues.next_waiting()
        if request is None or self._queues.tenant(request).is_best_effort:
            return []
        if self._lacks(request) is None:
            return []
        victims = self._victims(request)
        if not victims or self.obstacle(request, victims) is not None:
            return []

        def are_enough(count: int) -> bool:
            return self.obstacle(request, victims[:count]) is None

        most = 1  # most often one is
        while most < len(victims) and not are_enough(most):
            most *= 2
        least = most // 2 + 1
        few = least + bisect_left(range(least, min(most, len(victims))), True, key=are_enough)
        return victims[:few]

    def _victims(self, request: Request) -> list[Request]:
        """Return the running requests that may give way, the one that is harmed least first."""
        queues = self._queues
        own = queues.tenant(request)
        has_waited = self.has_waited(request)
        is_pressed = self.has_waited(request, _PRESSED)
        least = _LEAST_FEWER if own.num_running else 1
        num_running: dict[Tenant, int] = {}
        victims: list[Request] = []
        latest_first = reversed(queues.running.values())
        may_yield = latest_first if has_waited else (r for r in latest_first if r.is_best_effort)
        for running in sorted(may_yield, key=self._harm):
            tenant = queues.tenant_of_running(running.request_id)
            left = num_running.setdefault(tenant, tenant.num_running) - 1
            is_over = left / tenant.weight >= (own.num_running + least) / own.weight
            if not tenant.is_best_effort:
                yields = is_over and has_waited
            elif is_pressed:
                yields = is_over or tenant.counter_s > own.counter_s
            else:
                # Each time it must have had more first, or it would only begin again and again.
                again_s = running.num_preemptions * self._budget.prompt_s(running.num_tokens)
                yields = tenant.counter_s - again_s / tenant.weight > own.counter_s
            if yields and tenant is not own and not running.ends_in_flight:
                num_running[tenant] = left
                victims.append(running)
        return victims

    def admit(self, request: Request, found: Way) -> bool:
        """Let a waiting request run, with blocks for all of its tokens.

        So a begun prompt is never preempted for its own next chunk, and its blocks are adjacent.

        Args:
            found: what `PrefixLookup.match` has just found for the request.

        Returns:
            whether there were enough free blocks; if not, nothing has changed.
        """
        if not self._kv.reserve(request, found):
            return False
        is_transferred = request.message.kv_transfer is not None and request.scheduled_s is None
        if is_transferred and not self._kv.transfers_whole:
            self._kv.holds.begin(request, found)
        self._queues.admit(request)
        self.admitted[request.request_id] = found.num_computed_tokens
        short_hit = self._kv.lookup.short_hit(found)
        if short_hit is not None:
            self.short_hits[request.request_id] = short_hit
        if request.scheduled_s is None:
            request.scheduled_s = self._now_s
        if self._ends is not None:
            self._ends.add(request)
        self._note_pace([request])
        request.catch_up(found.num_computed_tokens)
        return True

    def let_yield(self) -> None:
        """Preempt the requests that give way to the next one."""
        for request in self.yielding():
            self._preempt(request)
        self._yielding = []

    def preempt_for(self, request: Request, spared: Collection[str]) -> None:
        """Preempt requests until a decode's token finds a block, at last the request itself.

        Args:
            spared: ids of requests that are not preempted.
        """
        while request.request_id in self._queues.running and not self._kv.reserve(request):
            self._preempt(self._victim(spared))

    def _victim(self, spared: Collection[str]) -> Request:
        """Return the request that preemption harms least."""
        latest_first = reversed(self._queues.running.values())
        return min((r for r in latest_first if r.request_id not in spared), key=self._harm)

    def _harm(self, request: Request) -> tuple[bool, float, bool]:
        """Return a sort key, lower for requests that preemption harms less.

        A best-effort request goes before a promised one; then a request of the tenant that has most
        running; then one with no stream to stall; then the latest admitted, which has, on the
        whole, least to compute again and most left to generate (docs/contributing/experiments.md).
        """
        tenant = self._queues.tenant_of_running(request.request_id)
        is_stream = request.first_token_s is not None
        return not tenant.is_best_effort, -tenant.running_by_weight, is_stream

    def _preempt(self, request: Request) -> None:
        self._kv.release(request)
        request.preempt()
        request.num_hit_tokens = self._kv.lookup.num_hit_tokens(request)
        self._queues.preempt(request)
        if self._ends is not None:
            self._ends.remove(request)
        if not request.is_best_effort:
            self._promised.remove_decode(request.num_tokens)
        self.preempted.append(request)

    def _lacks(
        self, request: Request, without: Sequence[Request] = (), *, for_others: bool = False
    ) -> Obstacle | None:
        """Return the obstacle to admission; `for_others` adds the room kept for other tenants."""
        kept_places, kept_pace = (KEPT_PLACES, KEPT_PACE) if for_others else (0.0, 0.0)
        if not self._has_place(request, without, kept_places):
            is_full = len(self._queues.running) - len(without) >= self._most_running
            return "max_num_seqs" if is_full else "memory"
        return None if self._can_pace(request, without, kept_pace) else "pace"

    def _has_place(self, request: Request, without: Sequence[Request], kept: float = 0.0) -> bool:
        """Whether one more request may run, and all would find blocks up to their ends."""
        num_running = len(self._queues.running) - len(without)
        if not num_running and not without:
            return self._kv.fits(request)
        if num_running >= places_left(self._most_running, kept):
            return False
        kv, num_leaving = self._kv, len(without)
        spare_blocks = int(kept * kv.num_blocks)
        spare_blocks -= sum([num_own_blocks(victim, kv.block_size) for victim in without])
        if without:  # they leave before the streams' next tokens take blocks
            spare_blocks += num_running
        # The forecast is made only if there is room for the next token of each.
        least = spare_blocks + num_running + 1
        if not kv.fits(request, spare_blocks=least, num_leaving=num_leaving):
            return False
        spare_blocks += self._expected_ends.peak_blocks(request, without)
        return kv.fits(request, spare_blocks=spare_blocks, num_leaving=num_leaving)

    @property
    def _expected_ends(self) -> ExpectedEnds:
        if self._ends is None:
            running = self._queues.running.values()
            self._ends = ExpectedEnds(running, self._lengths, self._kv.block_size)
        return self._ends

    def _can_pace(
        self, request: Request, without: Sequence[Request] = (), kept: float = 0.0
    ) -> bool:
        """Whether all promised streams would get their tokens in time up to their expected ends.

        An admitted request that is late all the same does not wait for that, too, nor does one
        that has waited as long as any may while nothing of its tenant runs.
        """
        if request.is_best_effort or (self._may_exceed_pace and self._queues.is_lost(request)):
            return True
        limit_s = (1.0 - kept) * min(self._promise_s, request.promise_s)
        if limit_s == UNLIMITED:
            return True
        if request is self.owed and not self._queues.tenant(request).num_running:
            return True
        if not without:
            now = self._promised.copy()
            now.add_decode(request.num_tokens)
            if not self._budget.keeps_pace(now, limit_s):
                self.too_slow = self.too_slow or now
                return False
        shapes = self._expected_ends.stream_shapes(request, without)
        slow = (shape for shape in shapes if not self._budget.keeps_pace(shape, limit_s))
        too_slow = next(slow, None)
        self.too_slow = self.too_slow or too_slow
        return too_slow is None

    def _note_pace(self, requests: Iterable[Request]) -> None:
        promised = [request for request in requests if not request.is_best_effort]
        self._promised.add_decodes([request.num_tokens for request in promised])
        self._promise_s = min([self._promise_s, *[request.promise_s for request in promised]])
