"""Admission and preemption: which requests run."""

from collections.abc import Collection, Iterable, Sequence

from legato.core.config import SchedulerConfig
from legato.core.request import Request
from legato.core.step_record import Obstacle, ShortHit
from legato.kv.manager import KVCacheManager
from legato.kv.prefix_node import Way
from legato.scheduler.budget import UNLIMITED, StepBudget
from legato.scheduler.memory_forecast import MemoryForecast, OutputLengths
from legato.scheduler.queues import Queues
from legato.scheduler.step_shape import StepShape
from legato.scheduler.tenants import KEPT_PACE, KEPT_PLACES, places_left

_MAX_YIELDS = 3
"""How often a best-effort request gives up its place to one with a promise."""


class Admission:
    """Admits waiting requests, and preempts running ones, within one step.

    A waiting request may run if there are a place, memory and pace for it beside the others.

    Args:
        running: the running requests whose streams go on after the steps in flight.
        now_s: time at which the step is planned.

    Attributes:
        admitted, short_hits: as in `StepRecord`.
        preempted: in order.
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
        self._now_s = now_s
        self.admitted: dict[str, int] = {}
        self.short_hits: dict[str, ShortHit] = {}
        self.preempted: list[Request] = []
        self._promised = StepShape()  # decodes of all running requests with a promise
        self._promise_s = UNLIMITED  # the tightest limit on a step among these
        self._memory: MemoryForecast | None = None  # of the running requests, made on demand
        self._note_pace(running)
        self._runs_best_effort = any(request.is_best_effort for request in running)

    @property
    def num_short_tokens(self) -> int:
        """Tokens in cached blocks that admitted requests compute again."""
        return sum(hit.num_matched_tokens - hit.num_tokens for hit in self.short_hits.values())

    def obstacle(self, request: Request) -> Obstacle | None:
        """Return why the request must wait; None if it may run."""
        obstacle = self._lacks(request)
        if obstacle is not None or not self.leaves_room(request):
            return obstacle
        return "tenants" if self._lacks(request, for_others=True) else None

    def leaves_room(self, request: Request) -> bool:
        """Whether the request must leave room for tenants that have less running."""
        tenants = self._queues.tenants
        return (
            len(tenants) > 1
            and not self._queues.is_urgent
            and not request.num_preemptions
            and tenants.may_come(self._queues.tenant(request), self._now_s, self._most_running)
        )

    def yielding_request(self) -> Request | None:
        """Return the best-effort request to preempt for a promised one; None if none must yield."""
        if not self._runs_best_effort:
            return None
        request = self._queues.next_waiting(best_effort=False)
        if request is None or self._has_place(request) or not self._can_pace(request):
            return None
        victim = self._queues.last_running(lambda r: r.is_best_effort)
        return victim if victim is not None and victim.num_preemptions < _MAX_YIELDS else None

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
        if self._memory is not None:
            self._memory.add(request)
        self._note_pace([request])
        request.catch_up(found.num_computed_tokens)
        return True

    def preempt_best_effort(self) -> None:
        """Preempt a best-effort request that keeps a promised one from being admitted."""
        victim = self.yielding_request()
        if victim is not None:
            self._preempt(victim)

    def preempt_for(self, request: Request, spared: Collection[str]) -> None:
        """Preempt requests until a decode's token finds a block, at last the request itself.

        Args:
            spared: ids of requests that are not preempted.
        """
        while request.request_id in self._queues.running and not self._kv.reserve(request):
            self._preempt(self._victim(spared))

    def _victim(self, spared: Collection[str]) -> Request:
        """Return the request that preemption harms least.

        A best-effort request goes before a promised one; then a request of the tenant that has most
        running; then one with no stream to stall; then the latest admitted, which has, on the
        whole, least to compute again and most left to generate (docs/contributing/experiments.md).
        """
        latest_first = reversed(self._queues.running.values())
        return min(
            (request for request in latest_first if request.request_id not in spared),
            key=lambda r: (
                not r.is_best_effort,
                -self._queues.tenant(r).running_by_weight,
                r.first_token_s is not None,
            ),
        )

    def _preempt(self, request: Request) -> None:
        self._kv.release(request)
        request.preempt()
        request.num_hit_tokens = self._kv.lookup.num_hit_tokens(request)
        self._queues.preempt(request)
        self._memory = None
        if not request.is_best_effort:
            self._promised.remove_decode(request.num_tokens)
        self.preempted.append(request)

    def _lacks(self, request: Request, *, for_others: bool = False) -> Obstacle | None:
        """Return the obstacle to admission; `for_others` adds the room kept for other tenants."""
        kept_places, kept_pace = (KEPT_PLACES, KEPT_PACE) if for_others else (0.0, 0.0)
        if not self._has_place(request, kept_places):
            is_full = len(self._queues.running) >= self._most_running
            return "max_num_seqs" if is_full else "memory"
        return None if self._can_pace(request, kept_pace) else "pace"

    def _has_place(self, request: Request, kept: float = 0.0) -> bool:
        """Whether one more request may run, and all would find blocks up to their ends."""
        num_running = len(self._queues.running)
        if not num_running:
            return self._kv.fits(request)
        if num_running >= places_left(self._most_running, kept):
            return False
        kept_blocks = int(kept * self._kv.num_blocks)
        # The forecast is made only between the least and the most blocks that they may need.
        most = -(-self._lengths.longest // self._kv.block_size)
        return self._kv.fits(request, spare_blocks=kept_blocks + (num_running + 1) * most) or (
            self._kv.fits(request, spare_blocks=kept_blocks + num_running + 1)
            and self._kv.fits(
                request, spare_blocks=kept_blocks + self._memory_forecast().peak_blocks(request)
            )
        )

    def _memory_forecast(self) -> MemoryForecast:
        if self._memory is None:
            running = [*self._queues.running.values()]
            self._memory = MemoryForecast(running, self._lengths, self._kv.block_size)
        return self._memory

    def _can_pace(self, request: Request, kept: float = 0.0) -> bool:
        """Whether all promised streams would still get their tokens in time beside the request.

        An admitted request that is late all the same does not wait for that, too.
        """
        if request.is_best_effort or (self._may_exceed_pace and request.is_late):
            return True
        self._promised.add_decode(request.num_tokens)
        limit_s = (1.0 - kept) * min(self._promise_s, request.promise_s)
        fits = self._budget.keeps_pace(self._promised, limit_s)
        self._promised.remove_decode(request.num_tokens)
        return fits

    def _note_pace(self, requests: Iterable[Request]) -> None:
        promised = [request for request in requests if not request.is_best_effort]
        self._promised.add_decodes([request.num_tokens for request in promised])
        self._promise_s = min([self._promise_s, *[request.promise_s for request in promised]])
