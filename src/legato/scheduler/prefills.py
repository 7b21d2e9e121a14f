"""The prefills of a step: chunks of prompts, begun and waiting ones alike."""

from collections.abc import Sequence
from itertools import chain

from legato.core.config import SchedulerConfig
from legato.core.request import Request
from legato.core.step_record import EndedBy, Obstacle
from legato.kv.manager import KVCacheManager
from legato.kv.prefix_node import Way
from legato.scheduler.admission import Admission
from legato.scheduler.budget import MIN_CHUNK, UNLIMITED
from legato.scheduler.dispatch import Dispatch
from legato.scheduler.queues import Place, Queues
from legato.scheduler.step import Step
from legato.scheduler.tenants import Tenant

_PATIENCE = 0.5
"""Share of `max_wait_s` that a begun prompt goes without a useful chunk before no request is
admitted, so that room comes free for it."""

_MOST_HELD = 16
"""Tenants whose next request cannot run, after which a step looks at no more of them."""

_KEPT_TIME = 0.6
"""Share of a step's time that a tenant's prompts leave free while other tenants may come: a new
request waits for the end of the step in which it arrives."""

_ALIGNED_SHARE = 0.75
"""Share of a chunk that is left, at least, when it is shortened to end at a certain position."""


class Prefills:
    """Adds chunks of prompts to a step by rank, and admits the waiting requests among them.

    Args:
        begun: running requests whose prompts are not all scheduled.
        dispatch: has the steps in flight.

    Attributes:
        held_by: as in `StepRecord`.
    """

    def __init__(
        self,
        begun: Sequence[Request],
        queues: Queues,
        admission: Admission,
        dispatch: Dispatch,
        kv: KVCacheManager,
        config: SchedulerConfig,
        now_s: float,
    ) -> None:
        assert config.max_num_batched_tokens is not None
        self._begun = begun
        self._queues = queues
        self._admission = admission
        self._in_flight = dispatch.plans
        self._in_flight_blocks = dispatch.first_blocks
        self._kv = kv
        self._is_chunked = config.enable_chunked_prefill
        self._most_tokens = config.max_num_batched_tokens
        self._now_s = now_s
        self._max_wait_s = config.max_wait_s
        self._may_admit = True
        self._held: set[Tenant] = set()  # tenants whose next request cannot run now
        self._holds_best_effort = False
        self._is_stalled = False  # whether a begun prompt waits for room that none may take
        self._serves_behind = False  # whether the step serves a tenant that is owed service
        self._gave_turn = False  # whether a best-effort prompt went before promised ones
        self.held_by: Obstacle | None = None

    def are_left_out(self, step: Step) -> bool:
        """Whether prompts wait only so that streams get their tokens in time."""
        are_held = bool(self._begun) or self.held_by in ("budget", "pace")
        return are_held and not step.shape.num_prefill_chunks

    def add(self, step: Step) -> None:
        """Give the step's room to prompts, in their order."""
        begun = self._begun_by_rank(step)
        while True:
            waiting = self._next_waiting()
            if begun and (waiting is None or self._goes_before(*begun[0], waiting)):
                first = begun.pop(0)[1]
            elif waiting is None:
                return
            else:
                first = waiting
            if first is not waiting:
                self._continue(step, first)
                continue
            if self._would_delay(first) and first is not self._admission.owed:
                self.held_by = self.held_by or "tenants"
                self._may_admit = False
                continue
            obstacle = self._begin(step, waiting)
            if obstacle is not None:
                self.held_by = self.held_by or obstacle
                self._hold(waiting, obstacle)

    def _goes_before(self, place: Place, begun: Request, waiting: Request) -> bool:
        if waiting is self._admission.owed:
            return False
        is_urgent = waiting.message.service.priority < begun.message.service.priority
        num_hit_tokens = 0 if is_urgent else waiting.num_hit_tokens
        if num_hit_tokens and num_hit_tokens > self._kv.lookup.match(waiting).num_computed_tokens:
            return True  # a begun prompt may be about to compute what it has in common with it
        return place <= self._queues.place(waiting)

    def _hold(self, request: Request, obstacle: Obstacle) -> None:
        """Let no request of its tenant overtake one that cannot run yet, or it might starve.

        Those of others may, unless they need the same.
        """
        tenant = self._queues.tenant(request)
        self._held.add(tenant)
        is_shared = obstacle in ("budget", "max_num_seqs", "pace")
        if (is_shared and request is not self._admission.owed) or len(self._held) >= _MOST_HELD:
            self._may_admit = False
        elif obstacle == "memory":
            self._may_admit = not self._admission.holds_others(request)
            # A best-effort request would have to give its blocks back at once.
            self._holds_best_effort |= not tenant.is_best_effort

    def _begun_by_rank(self, step: Step) -> list[tuple[Place, Request]]:
        """Return the begun prompts without a chunk in the step, by rank."""
        begun = [
            (self._queues.place(request), request)
            for request in self._begun
            if request not in step and request.request_id in self._queues.running
        ]
        begun.sort(key=lambda ranked: ranked[0])
        return begun

    def _next_waiting(self) -> Request | None:
        owed = self._admission.owed
        is_waiting = owed is not None and owed.request_id not in self._queues.running
        if owed is not None and is_waiting and self._queues.tenant(owed) not in self._held:
            return owed
        request = self._queues.next_waiting(self._held) if self._may_admit else None
        while request in self._admission.preempted:  # for another, which begins in this step
            self._held.add(self._queues.tenant(request))
            request = self._queues.next_waiting(self._held)
        if request is None:
            return None
        if self._holds_best_effort and self._queues.tenant(request).is_best_effort:
            return None
        return None if self._is_stalled else request

    def _would_delay(self, request: Request) -> bool:
        """Whether the request would delay the step's prompts of tenants that are owed service.

        They would end later by the time of its prompt. False if its own tenant is owed service.
        """
        if not self._serves_behind or self._queues.is_urgent:
            return False
        return not self._queues.tenants.is_owed(self._queues.tenant(request))

    def _continue(self, step: Step, request: Request) -> None:
        """Add the next chunk of a begun prompt, unless another's chunk computes its tokens."""
        start, end = request.num_scheduled_tokens, self._chunk_end(request)
        writer = self._writer(step, self._kv.next_block(request))
        if writer not in (None, request.request_id) or end <= start:
            # The next step finds this block computed; other requests need not wait meanwhile.
            request.stalled_since_s = None
            return
        if self._kv.shares_computed_only:
            if self._follows(step, request, start):
                request.stalled_since_s = None
                return
            request.catch_up(self._kv.find_again(request))
            start, end = request.num_scheduled_tokens, self._chunk_end(request)
        num_tokens = 0
        if not self._would_delay(request):
            num_tokens = self._chunk_size(step, request, start, end)
        if num_tokens >= min(MIN_CHUNK, end - start):
            request.stalled_since_s = None
        elif request.stalled_since_s is None:
            request.stalled_since_s = self._now_s
        else:
            waits = (self._now_s - request.stalled_since_s) / self._max_wait_s
            tenant = self._queues.tenant_of_running(request.request_id)
            self._is_stalled |= waits > _PATIENCE and not tenant.is_best_effort
            if waits > 1.0:  # it moves at the cost of a promise
                num_tokens = self._least_chunk(step, end - start)
                request.stalled_since_s = self._now_s - _PATIENCE * self._max_wait_s
        if num_tokens:
            self._add(step, request, num_tokens)

    def _begin(self, step: Step, request: Request) -> Obstacle | None:
        """Admit a request, with a chunk or after another's chunk; return why it must wait."""
        must_begin = not step.is_for_streams and request is self._admission.owed
        # Room is cheaper to check than cache hits.
        if step.chunks and not must_begin and not step.prefill_room(0, 1):
            return "budget"
        obstacle = self._admission.obstacle(request)
        if obstacle is not None:
            return obstacle
        found = self._kv.lookup.match(request)
        num_computed = found.num_computed_tokens
        request.num_hit_tokens = found.num_tokens
        next_block, end = found.next_block, self._chunk_end(request, found)
        follows = (
            end <= num_computed
            or (next_block is not None and self._writer(step, next_block) is not None)
            or (self._kv.shares_computed_only and self._follows(step, request, num_computed))
        )
        num_tokens = 0 if follows else self._chunk_size(step, request, num_computed, end)
        if must_begin and not follows:
            num_tokens = num_tokens or self._least_chunk(step, end - num_computed)
        if not (follows or num_tokens):
            return "budget"
        if not self._admission.admit(request, found):
            return "memory"
        if num_tokens:
            self._add(step, request, num_tokens)
        return None

    def _add(self, step: Step, request: Request, num_tokens: int) -> None:
        if step.add_prefill(request, num_tokens, self._ended_by(step, request, num_tokens)):
            tenant = self._queues.tenant_of_running(request.request_id)
            self._gave_turn |= tenant.is_best_effort
            self._serves_behind |= self._queues.tenants.is_owed(tenant)

    def _chunk_end(self, request: Request, found: Way | None = None) -> int:
        """Return where the next chunk of a prompt ends, at the latest.

        Args:
            found: what `PrefixLookup.match` has just found for a request without blocks.
        """
        end = self._kv.holds.arriving_from(request, found)
        return self._kv.chunk_end(request, end, found) if self._is_chunked else end

    def _chunk_size(self, step: Step, request: Request, start: int, end: int) -> int:
        """Return how many of the request's tokens [start, end) fit into the step."""
        wanted = end - start
        room = step.prefill_room(start, wanted)
        num_more = int(request.request_id not in self._queues.running)
        if step.limit_s < UNLIMITED and self._admission.leaves_room(request, num_more=num_more):
            # Decodes may leave nothing of a shorter limit; the chunk then is a small one.
            room = min(room, step.prefill_room(start, wanted, kept=_KEPT_TIME))
        if not room and not step.chunks:
            # No stream waits for this step: it may take longer, but must not be empty.
            room = self._least_chunk(step, wanted)
        if room == wanted:
            return room
        return self._aligned(start, room) if self._is_chunked else 0

    def _least_chunk(self, step: Step, wanted: int) -> int:
        """Return the tokens of a chunk that a step must have, however long it takes."""
        return max(0, min(wanted, MIN_CHUNK, self._most_tokens - step.shape.num_tokens))

    def _aligned(self, start: int, num_tokens: int) -> int:
        """Shorten a chunk to end where recurrences do, unless that costs much of it."""
        end = start + num_tokens
        aligned = end - end % self._kv.chunk_multiple - start
        return aligned if aligned >= _ALIGNED_SHARE * num_tokens else num_tokens

    def _ended_by(self, step: Step, request: Request, num_tokens: int) -> EndedBy:
        """Return why a prefill chunk that is about to be added is not longer."""
        if num_tokens == request.num_remaining_tokens:
            return "prompt_end"
        end = request.num_scheduled_tokens + num_tokens
        if end == self._kv.chunk_end(request, request.num_tokens):
            return "checkpoint"
        bound = step.prefill_bound(num_tokens)
        gave_way = self._gave_turn and not request.is_best_effort
        return "turn" if gave_way and bound != "memory" else bound

    def _follows(self, step: Step, request: Request, start: int) -> bool:
        """Whether a prompt in a step computes what the request needs from token `start` on.

        The request finds it in a later step; see `KVCacheManager.shares_computed_only`.
        """
        running = self._queues.running
        return any(
            self._kv.leads(chunk, running[chunk.request_id], request)
            for chunk in chain(step.chunks, *(plan.chunks for plan in self._in_flight))
            if chunk.kind == "prefill" and chunk.start >= start and chunk.request_id in running
        )

    def _writer(self, step: Step, block_id: int) -> str | None:
        """Return the id of the request that computes a block, in this step or one in flight."""
        return step.first_blocks.get(block_id) or self._in_flight_blocks.get(block_id)
