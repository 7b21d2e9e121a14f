"""A step under construction: the parts that all policies share."""

from collections.abc import Mapping, Sequence
from itertools import chain

from legato.core.config import SchedulerConfig
from legato.core.plan import ScheduledChunk, StepPlan
from legato.core.request import Request
from legato.core.step_record import EndedBy, Obstacle
from legato.kv.manager import KVCacheManager
from legato.kv.prefix_node import Way
from legato.scheduler.admission import Admission
from legato.scheduler.budget import MIN_CHUNK, UNLIMITED, StepBudget
from legato.scheduler.output_lengths import OutputLengths
from legato.scheduler.queues import Place, Queues
from legato.scheduler.step_shape import StepShape
from legato.scheduler.turns import PrefillTurns
from legato.speculation.drafter import Draft

_PATIENCE_S = 10.0
"""How long a begun prompt may go without a useful chunk for lack of room beside the streams. After
that no request is admitted until it fits."""

_KEPT_TIME = 0.6
"""Share of a step's time that a tenant's prompts leave free while other tenants may come: a new
request waits for the end of the step in which it arrives."""

_ALIGNED_SHARE = 0.75
"""Share of a chunk that is left, at least, when it is shortened to end at a certain position."""


class StepBuilder:
    """Collects the chunks of one step. Requests are admitted and preempted as it goes.

    Args:
        in_flight_blocks: the `first_blocks` of all steps in flight.
        in_flight: the plans of these steps.
        begins_s: when the step can begin: the end of the steps in flight.
        idle_limit_s: how long the step may take if no token is due.
        may_hurry: whether prompts may wait for the next step; False after a step in which they did.

    Attributes:
        first_blocks: the first block of each prefill chunk; key the block, value the request's id.
            Requests that share their next block have come equally far, so the other blocks of a
            chunk cannot be another request's next block.
        becoming_streams: requests whose prompts end in this step.
        limit_s: time from the step's beginning until the next token of a running stream is due; set
            by `add_decodes`.
        is_due: whether `limit_s` is until such a token, and not that of a step without one.
        is_hurried: whether prompts wait for the next step: this one begins late, so that its
            streams leave nothing of `limit_s`, though they leave something of a whole promise.
        drafting_s: seconds spent on making drafts, already taken off `limit_s`.
        admission: has the requests that were admitted and preempted.
        held_by: as in `StepRecord`.
    """

    def __init__(
        self,
        queues: Queues,
        kv: KVCacheManager,
        budget: StepBudget,
        turns: PrefillTurns,
        lengths: OutputLengths,
        config: SchedulerConfig,
        in_flight_blocks: Mapping[int, str],
        in_flight: Sequence[StepPlan],
        *,
        now_s: float,
        begins_s: float,
        idle_limit_s: float,
        may_hurry: bool,
    ) -> None:
        self._queues = queues
        self._kv = kv
        self._budget = budget
        self._turns = turns
        assert config.max_num_batched_tokens is not None
        self._most = config.max_num_batched_tokens
        self._config = config
        self._now_s = now_s
        self._begins_s = begins_s
        self._idle_limit_s = idle_limit_s
        self._may_hurry = may_hurry
        self._in_step: set[str] = set()  # request ids
        self._in_flight_blocks = in_flight_blocks
        self._in_flight = in_flight
        self._streams: list[Request] = []  # each waits for its next token
        self._begun: list[Request] = []  # the other running requests
        self._yielding: list[Request] = []  # best-effort streams that get the rest of the step
        self._may_admit = True
        self._lacks_room: Request | None = None  # request that holds up all admissions
        self._serves_behind = False  # whether the step serves a tenant that is owed service
        self._gave_turn = False  # whether a best-effort prompt went before promised ones
        self.held_by: Obstacle | None = None
        self.limit_s = UNLIMITED
        self.is_due = False
        self.is_hurried = False
        self.drafting_s = 0.0
        self.shape = StepShape()
        self.chunks: list[ScheduledChunk] = []
        self.first_blocks: dict[int, str] = {}
        self.becoming_streams: list[Request] = []
        running = [request for request in queues.running.values() if not request.ends_in_flight]
        for request in running:
            is_stream = request.is_stream
            if not is_stream:
                request.catch_up(kv.num_computed_tokens(request))
                is_stream = request.is_stream
            (self._streams if is_stream else self._begun).append(request)
        self.admission = Admission(queues, kv, budget, lengths, config, running, now_s)

    @property
    def must_wait(self) -> bool:
        """Whether this step must wait for a step in flight: for a token's value or for blocks.

        No request is preempted while a step is in flight: that step may compute it.
        """
        return (
            any(request.waits_for_token for request in self._streams)
            or not all(
                self._kv.reserve(r)
                for r in self._streams
                if r.num_expected_tokens > r.num_reserved_tokens
            )
            or self.admission.yielding_request() is not None
        )

    @property
    def drafting_streams(self) -> list[Request]:
        """Streams with a decode in the step that have generated a token before."""
        return [
            request
            for request in self._streams
            if request.request_id in self._in_step and request.num_output_tokens
        ]

    @property
    def most_drafts(self) -> int:
        """Drafts for whose states there are slots; without recurrent layers, more than enough."""
        return self._kv.most_drafts

    @property
    def is_over_budget(self) -> bool:
        return self._budget.is_exceeded(self.shape, self.limit_s)

    @property
    def leaves_prefill_out(self) -> bool:
        """Whether prompts wait only so that streams get their tokens in time."""
        is_held = bool(self._begun) or self.held_by in ("budget", "pace")
        return is_held and not self.shape.num_prefill_chunks

    def add_decodes(self) -> None:
        """Move every running stream forward by one token, even beyond the budget.

        If promised tokens are due, best-effort streams take turns: the stream that waited longest
        joins the step, and the others as far as they fit into the time that prefill leaves.
        """
        due_s = self._add_decodes([r for r in self._streams if not r.is_best_effort])
        running = self._queues.running
        best_effort = [r for r in self._streams if r.is_best_effort and r.request_id in running]
        self.limit_s = due_s - self._begins_s
        self.is_due = due_s < UNLIMITED
        if not self.is_due:
            self.limit_s = self._idle_limit_s
            self._add_decodes(best_effort)
            return
        best_effort.sort(key=lambda r: r.last_expected_s or 0.0)
        num_promised = len(self.chunks)
        while best_effort and len(self.chunks) == num_promised:
            # A stream that is preempted for lack of memory leaves its turn to the next one.
            self._add_decodes([best_effort.pop(0)])
        self._yielding = best_effort

    def add_prefills(self) -> None:
        """Spend the budget on promised prompts, except for the turns of best-effort ones."""
        self.is_hurried = self._may_hurry and self._begins_late()
        if self._turns.is_best_efforts:
            self._add_prefills(best_effort=True, most=1)
            self._gave_turn = bool(self.shape.num_prefill_chunks)
            if self._lacks_room is not None:
                self._may_admit = self._turns.may_pass(self._lacks_room, self._now_s)
            self._serves_behind = False  # a best-effort turn delays no promised request
        self._add_prefills(best_effort=False)

    def add_best_effort(self) -> None:
        """Give the rest of the step to best-effort requests: decodes first, then prompts."""
        for request in self._yielding:
            self.shape.add_decode(request.num_expected_tokens)
            fits = self._budget.fits_decode(self.shape, self.limit_s)
            self.shape.remove_decode(request.num_expected_tokens)
            if not fits:
                break
            self._add_decodes([request])
        self._add_prefills(best_effort=True)

    def spend(self, drafting_s: float) -> None:
        """Take the time spent on drafts off the step's limit."""
        self.drafting_s += drafting_s
        self.limit_s -= drafting_s

    def draft(self, request: Request, draft: Draft, num_drafts: int) -> bool:
        """Add the first `num_drafts` tokens of a draft after a stream's next token.

        Returns:
            whether there were blocks for all of them.
        """
        num_tokens = request.num_expected_tokens
        request.num_expected_tokens += num_drafts - 1
        has_room = self._kv.reserve(request)
        count = num_drafts if has_room else max(0, request.num_reserved_tokens - num_tokens + 1)
        request.num_expected_tokens = num_tokens + count
        request.num_scheduled_tokens += count
        if count:
            place, chunk = next(
                (i, chunk)
                for i, chunk in enumerate(self.chunks)
                if chunk.request_id == request.request_id
            )
            self.shape.add_drafts(chunk.start + 1, count)
            self.chunks[place] = ScheduledChunk(
                request.request_id,
                chunk.start,
                1 + count,
                self._kv.block_ids(request),
                1 + count,
                "verify",
                draft_token_ids=tuple(draft.token_ids[:count]),
                drafter=draft.drafter,
                window_block_ids=self._kv.window_tables([request])[0],
            )
        return has_room

    def _add_prefills(self, *, best_effort: bool, most: int | None = None) -> None:
        """Add at most `most` chunks of prompts by rank, begun and waiting ones alike."""
        begun = self._begun_by_rank(best_effort)
        num_before = len(self.chunks)
        while most is None or len(self.chunks) - num_before < most:
            waiting = self._next_waiting(best_effort)
            if begun and (waiting is None or begun[0][0] <= self._queues.place(waiting)):
                first = begun.pop(0)[1]
            elif waiting is None:
                return
            else:
                first = waiting
            if self._would_delay(first):
                self.held_by = "tenants" if first is waiting else self.held_by
                return
            if first is not waiting:
                self._continue(first)
            elif not self._begin(waiting):
                # No request overtakes one that cannot be admitted yet, or it might starve.
                self._may_admit, self._lacks_room = False, waiting

    def _would_delay(self, request: Request) -> bool:
        """Whether the request would delay the step's prompts of tenants that are owed service.

        They would end later by the time of its prompt. False if its own tenant is owed service.
        """
        if not self._serves_behind or self._queues.is_urgent:
            return False
        return not self._queues.tenants.is_behind(self._queues.tenant(request))

    def _next_waiting(self, best_effort: bool) -> Request | None:
        request = self._queues.next_waiting(best_effort=best_effort) if self._may_admit else None
        return None if request in self.admission.preempted else request

    def _begun_by_rank(self, best_effort: bool) -> list[tuple[Place, Request]]:
        """Return the begun prompts without a chunk in this step, by rank."""
        begun = [
            (self._queues.place(request), request)
            for request in self._begun
            if request.is_best_effort is best_effort
            and request.request_id not in self._in_step
            and request.request_id in self._queues.running
        ]
        begun.sort(key=lambda ranked: ranked[0])
        return begun

    def _continue(self, request: Request) -> None:
        start, end = request.num_scheduled_tokens, self._chunk_end(request)
        if self._writer(self._kv.next_block(request)) not in (None, request.request_id) or (
            end <= start
        ):
            # The next step finds this block computed; other requests need not wait meanwhile.
            request.stalled_since_s = None
            return
        if self._kv.shares_computed_only:
            if self._follows(request, start):
                request.stalled_since_s = None
                return
            request.catch_up(self._kv.find_again(request))
            start, end = request.num_scheduled_tokens, self._chunk_end(request)
        num_tokens = self._chunk_size(request, start, end)
        if num_tokens >= min(MIN_CHUNK, end - start):
            request.stalled_since_s = None
        elif request.stalled_since_s is None:
            request.stalled_since_s = self._now_s
        elif self._now_s - request.stalled_since_s > _PATIENCE_S:
            self._may_admit, self._lacks_room = False, request
        if num_tokens:
            self._add_prefill(request, num_tokens)

    def _begin(self, request: Request) -> bool:
        """Admit a request, with a chunk or after another's chunk; False if it must wait."""
        self.held_by = "budget" if self._is_full() else self.admission.obstacle(request)
        if self.held_by is not None:
            return False
        found = self._kv.lookup.match(request)
        num_computed = found.num_computed_tokens
        request.num_hit_tokens = found.num_tokens
        next_block, end = found.next_block, self._chunk_end(request, found)
        follows = (
            end <= num_computed
            or (next_block is not None and self._writer(next_block) is not None)
            or (self._kv.shares_computed_only and self._follows(request, num_computed))
        )
        num_tokens = 0 if follows else self._chunk_size(request, num_computed, end)
        if not (follows or num_tokens):
            self.held_by = "budget"
            return False
        if not self.admission.admit(request, found):
            self.held_by = "memory"
            return False
        if num_tokens:
            self._add_prefill(request, num_tokens)
        return True

    def _is_full(self) -> bool:
        """Whether no prefill token fits; cheaper to check than a prompt's cache hits."""
        return bool(self.chunks) and not self._room(0, 1, self.limit_s)

    def _chunk_end(self, request: Request, found: Way | None = None) -> int:
        """Return where the next chunk of a prompt ends, at the latest.

        Args:
            found: what `PrefixLookup.match` has just found for a request without blocks.
        """
        end = self._kv.holds.arriving_from(request, found)
        if not self._config.enable_chunked_prefill:
            return end
        return self._kv.chunk_end(request, end, found)

    def _chunk_size(self, request: Request, start: int, end: int) -> int:
        """Return how many of the request's tokens [start, end) fit into the step."""
        wanted = end - start
        limit_s = self.limit_s
        room = self._room(start, wanted, limit_s)
        if limit_s < UNLIMITED and self.admission.leaves_room(request):
            # Decodes may leave nothing of a shorter limit; the chunk then is a small one.
            short_s = limit_s * (1.0 - _KEPT_TIME)
            room = min(room, self._room(start, wanted, short_s))
        if not room and not self.chunks:
            # No stream waits for this step: it may take longer, but must not be empty.
            room = min(wanted, MIN_CHUNK, self._most)
        if not self._config.enable_chunked_prefill:
            return room if room == wanted else 0
        return room if room == wanted else self._aligned(start, room)

    def _room(self, start: int, wanted: int, limit_s: float) -> int:
        """Return the most prefill tokens for a chunk; none in a hurried step."""
        return 0 if self.is_hurried else self._budget.max_chunk(self.shape, start, wanted, limit_s)

    def _begins_late(self) -> bool:
        """Whether the decodes leave nothing of the limit, but something of a whole promise."""
        if not self.is_due or self._budget.fits_decode(self.shape, self.limit_s):
            return False
        promised_s = min(request.step_s for request in self._streams)
        return self._budget.fits_decode(self.shape, promised_s)

    def _aligned(self, start: int, num_tokens: int) -> int:
        """Shorten a chunk to end where recurrences do, unless that costs much of it."""
        end = start + num_tokens
        aligned = end - end % self._kv.chunk_multiple - start
        return aligned if aligned >= _ALIGNED_SHARE * num_tokens else num_tokens

    def _add_decodes(self, requests: list[Request]) -> float:
        """Add the next token of each request, except those preempted for lack of memory.

        Returns:
            the time at which the first of these tokens is due; `UNLIMITED` if none is.
        """
        added = self._with_room(requests)
        due_s = min([request.next_due_s for request in added], default=UNLIMITED)
        self.shape.add_decodes([request.num_expected_tokens for request in added])
        self.chunks += [
            ScheduledChunk(
                r.request_id,
                r.num_expected_tokens - 1,
                1,
                block_ids,
                1,
                "decode",
                window_block_ids=windows,
            )
            for r, block_ids, windows in zip(
                added, self._kv.block_tables(added), self._kv.window_tables(added), strict=True
            )
        ]
        for request in added:
            request.num_scheduled_tokens += 1
            request.num_expected_tokens += 1
        return due_s

    def _with_room(self, requests: list[Request]) -> list[Request]:
        """Return the requests that are now in the step: all that were not preempted for others."""
        lacking = [r for r in requests if r.num_expected_tokens > r.num_reserved_tokens]
        if not self.admission.preempted and all(map(self._kv.reserve, lacking)):
            self._in_step.update([request.request_id for request in requests])
            return requests
        running = self._queues.running
        kept: list[Request] = []
        for request in requests:
            if request.num_expected_tokens > request.num_reserved_tokens:
                self.admission.make_room(request, self._in_step)
            if request.request_id in running:
                self._in_step.add(request.request_id)
                kept.append(request)
        return kept

    def _add_prefill(self, request: Request, num_tokens: int) -> None:
        if not self._kv.reserve_chunk(request, num_tokens):
            return  # steps in flight keep blocks of requests that have ended
        self._turns.served(best_effort=request.is_best_effort)
        self._serves_behind |= self._queues.tenants.is_behind(self._queues.tenant(request))
        self.first_blocks[self._kv.next_block(request)] = request.request_id
        samples = num_tokens == request.num_remaining_tokens and not request.is_pooled
        if samples:
            self.becoming_streams.append(request)
        chunk = ScheduledChunk(
            request.request_id,
            request.num_scheduled_tokens,
            num_tokens,
            self._kv.block_ids(request),
            int(samples),
            "prefill",
            self._ended_by(request, num_tokens),
            window_block_ids=self._kv.window_tables([request])[0],
        )
        self.shape.add(chunk)
        self.chunks.append(chunk)
        self._in_step.add(request.request_id)
        request.num_scheduled_tokens += num_tokens
        request.num_expected_tokens += chunk.num_samples

    def _follows(self, request: Request, start: int) -> bool:
        """Whether a prompt in a step computes what the request needs from token `start` on.

        The request finds it in a later step; see `KVCacheManager.shares_computed_only`.
        """
        running = self._queues.running
        return any(
            self._kv.leads(chunk, running[chunk.request_id], request)
            for chunk in chain(self.chunks, *(plan.chunks for plan in self._in_flight))
            if chunk.kind == "prefill" and chunk.start >= start and chunk.request_id in running
        )

    def _writer(self, block_id: int) -> str | None:
        """Return the id of the request that computes a block, in this step or one in flight."""
        return self.first_blocks.get(block_id) or self._in_flight_blocks.get(block_id)

    def _ended_by(self, request: Request, num_tokens: int) -> EndedBy:
        """Return why a prefill chunk that is about to be added is not longer."""
        if num_tokens == request.num_remaining_tokens:
            return "prompt_end"
        end = request.num_scheduled_tokens + num_tokens
        if end == self._kv.chunk_end(request, request.num_tokens):
            return "checkpoint"
        bound = self._budget.bound(self.shape, num_tokens)
        gave_way = self._gave_turn and not request.is_best_effort
        return "turn" if gave_way and bound != "memory" else bound
