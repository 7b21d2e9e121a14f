"""Admission: whether a waiting request may run beside the running ones."""

from collections.abc import Iterable, Sequence

import numpy as np

from legato.core.config import SchedulerConfig
from legato.core.request import Request
from legato.core.step_record import Obstacle
from legato.kv.manager import KVCacheManager
from legato.scheduler.budget import UNLIMITED, StepBudget
from legato.scheduler.output_lengths import Counts, OutputLengths
from legato.scheduler.queues import Queues
from legato.scheduler.step_shape import StepShape
from legato.scheduler.tenants import KEPT_PACE, KEPT_PLACES, places_left

_MAX_YIELDS = 3
"""How often a best-effort request gives up its place to one with a promise."""


class MemoryForecast:
    """Plays running requests forward to their expected ends, all at the same pace.

    A request that ends returns its blocks, and the others can grow into them. So the highest level
    on the way counts, not the sum at all ends (Gong et al., Past-Future Scheduler, ASPLOS 2025).
    """

    def __init__(self, running: Sequence[Request], lengths: OutputLengths, block_size: int) -> None:
        self._lengths = lengths
        self._block_size = block_size
        self._ends = self._foresee(running)
        self._asked: Request | None = None
        self._answer = 0

    def add(self, request: Request) -> None:
        """Add a running request."""
        self._ends = self._with(request)
        self._asked = None

    def peak_blocks(self, request: Request) -> int:
        """Return the peak growth in blocks if the request runs too.

        The growth is that beyond the blocks in use now and the request's first blocks.
        """
        if request is not self._asked:  # asked repeatedly for the next waiting request
            self._asked, self._answer = request, self._peak_blocks(request)
        return self._answer

    def _peak_blocks(self, request: Request) -> int:
        num_tokens, num_blocks = self._with(request)
        by_end = num_tokens.argsort()
        given_back = num_blocks[by_end].cumsum() - num_blocks[by_end]  # [R], before each end
        num_left = np.arange(len(by_end), 0, -1)
        grown = num_left * -(-num_tokens[by_end] // self._block_size)
        return int((grown - given_back).max())

    def _with(self, request: Request) -> Counts:
        return np.concatenate((self._ends, self._foresee([request])), axis=1)

    def _foresee(self, requests: Sequence[Request]) -> Counts:
        """Return each request's tokens until its end, and present blocks that its end frees."""
        # Other requests may share the blocks that a request found in the cache.
        num_own = np.array([r.num_tokens - r.num_cached_tokens for r in requests])
        num_tokens = self._lengths.expected_tokens(requests)
        return np.stack((num_tokens, -(-num_own // self._block_size)))  # [2, R]


class Admission:
    """Checks places, memory and pace for waiting requests, within one step.

    Args:
        running: the running requests whose streams go on after the steps in flight.
        now_s: time at which the step is planned.
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
        self._promised = StepShape()  # decodes of all running requests with a promise
        self._pace_s = UNLIMITED  # the tightest limit on a step among these
        self._memory: MemoryForecast | None = None  # of the running requests, made on demand
        self._note_pace(running)
        self._runs_best_effort = any(request.is_best_effort for request in running)

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

    def note_admitted(self, request: Request) -> None:
        """Count a request that runs from this step on."""
        if self._memory is not None:
            self._memory.add(request)
        self._note_pace([request])

    def note_preempted(self, request: Request) -> None:
        """Stop counting a request that no longer runs."""
        self._memory = None
        if not request.is_best_effort:
            self._promised.remove_decode(request.num_tokens)

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
        limit_s = (1.0 - kept) * min(self._pace_s, request.step_s)
        fits = self._budget.paces(self._promised, limit_s)
        self._promised.remove_decode(request.num_tokens)
        return fits

    def _note_pace(self, requests: Iterable[Request]) -> None:
        promised = [request for request in requests if not request.is_best_effort]
        self._promised.add_decodes([request.num_tokens for request in promised])
        self._pace_s = min([self._pace_s, *[request.step_s for request in promised]])
