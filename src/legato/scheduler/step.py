"""A step under construction: its chunks, and what it has left."""

from bisect import bisect_left
from collections.abc import Sequence, Set
from itertools import count

from legato.core.plan import GivenTokens, ScheduledChunk
from legato.core.request import Request
from legato.core.step_record import EndedBy
from legato.kv.manager import KVCacheManager
from legato.scheduler.budget import UNLIMITED, StepBudget
from legato.scheduler.step_shape import StepShape
from legato.speculation.drafter import Draft


class Step:
    """Takes chunks, and says how many tokens still fit into its time, budget and blocks.

    A request has at most one chunk, and moves forward when that is added.

    Args:
        is_due: also an attribute.

    Attributes:
        limit_s: seconds that the step may take.
        is_due: whether a stream's next token is due at that time.
        drafting_s: seconds spent on making drafts, already taken off `limit_s`.
        is_for_streams: whether prompts wait for the next step: this one begins late.
        shape: counts of the chunks.
        first_blocks: the first block of each prefill chunk; key the block, value the request's id.
            Requests that share their next block have come equally far, so the other blocks of a
            chunk cannot be another request's next block.
        becoming_streams: requests whose prompts end in this step.
        lacked_room_at: position of the first chunk that the budget left no room for; None if none.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        budget: StepBudget,
        *,
        limit_s: float = UNLIMITED,
        is_due: bool = False,
    ) -> None:
        self._kv = kv
        self._budget = budget
        self.limit_s = limit_s
        self.is_due = is_due
        self.drafting_s = 0.0
        self.is_for_streams = False
        self.shape = StepShape()
        self.chunks: list[ScheduledChunk] = []
        self.first_blocks: dict[int, str] = {}
        self.becoming_streams: list[Request] = []
        self.lacked_room_at: int | None = None
        self._places: dict[str, int] = {}  # key request id, value index of its chunk

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._places

    @property
    def request_ids(self) -> Set[str]:
        """Ids of the requests that have a chunk."""
        return self._places.keys()

    @property
    def most_drafts(self) -> int:
        """Drafts for whose states there are slots; without recurrent layers, more than enough."""
        return self._kv.most_drafts

    @property
    def is_over_budget(self) -> bool:
        """Whether the step breaks a promise, or has too many tokens, which decodes can cause."""
        return self._budget.is_exceeded(self.shape, self.limit_s)

    def ends_within(self, seconds: float) -> bool:
        """Whether the step ends in time with its decodes, as the budget sees it."""
        return self._budget.fits_decode(self.shape, seconds)

    def num_fitting(self, streams: Sequence[Request]) -> int:
        """Return how many of the streams, the first ones, still end in time with their tokens."""

        def is_late(num_streams: int) -> bool:
            shape = self.shape.copy()
            shape.add_decodes([request.num_expected_tokens for request in streams[:num_streams]])
            return not self._budget.fits_decode(shape, self.limit_s)

        most = 1  # often few fit: the others have long contexts
        while most < len(streams) and not is_late(most):
            most *= 2
        fitting = most // 2
        most = min(most, len(streams))
        return fitting + bisect_left(range(fitting + 1, most + 1), True, key=is_late)

    def prefill_room(self, start: int, wanted: int, *, kept: float = 0.0) -> int:
        """Return the most prefill tokens, up to `wanted`, for a chunk at position `start`.

        Args:
            kept: share of the time that other chunks may need.
        """
        if self.is_for_streams:
            return 0
        room = self._budget.max_chunk(self.shape, start, wanted, self.limit_s * (1.0 - kept))
        if not (room or kept or self.lacked_room_at is not None):
            self.lacked_room_at = start
        return room

    def with_refused(self, too_slow: StepShape | None) -> StepShape | None:
        """Return the shape with one more token, of work that lacked time; None without such work.

        Args:
            too_slow: as of `Admission`.
        """
        shape = self.shape.without_drafts()
        if self.lacked_room_at is not None:
            shape.add_prefill(self.lacked_room_at, 1, samples=1)
            return shape
        return too_slow

    def prefill_bound(self, num_tokens: int) -> EndedBy:
        """Return the limit that stops a prefill chunk at `num_tokens`, the most that fit."""
        return self._budget.bound(self.shape, num_tokens)

    def spend(self, drafting_s: float) -> None:
        """Take the time spent on drafts off the step's limit."""
        self.drafting_s += drafting_s
        self.limit_s -= drafting_s

    def add_decodes(self, requests: Sequence[Request]) -> None:
        """Add the next tokens of streams that have blocks for them, even beyond the budget."""
        ids = [request.request_id for request in requests]
        self._places.update(zip(ids, count(len(self.chunks)), strict=False))
        self.shape.add_decodes([request.num_expected_tokens for request in requests])
        tables = self._kv.block_tables(requests)
        windows = self._kv.window_tables(requests)
        self.chunks += [
            ScheduledChunk(
                r.request_id,
                r.num_expected_tokens - 1,
                1,
                block_ids,
                1,
                "decode",
                window_block_ids=window_block_ids,
                given=_given(r) if r.num_given_tokens and not r.is_being_sampled else None,
            )
            for r, block_ids, window_block_ids in zip(requests, tables, windows, strict=True)
        ]
        assert len(self._places) == len(self.chunks), "a request has one chunk"
        for request in requests:
            request.num_scheduled_tokens += 1
            request.num_expected_tokens += 1

    def add_drafts(self, request: Request, draft: Draft, num_drafts: int) -> bool:
        """Add the first `num_drafts` tokens of a draft after a stream's next token.

        Returns:
            whether there were blocks for all of them.
        """
        place = self._places[request.request_id]
        chunk = self.chunks[place]
        has_room = self._kv.grow(request, chunk.end + num_drafts)
        num_fitting = num_drafts if has_room else request.num_reserved_tokens - chunk.end
        if num_fitting:
            request.num_scheduled_tokens += num_fitting
            request.num_expected_tokens += num_fitting
            self.shape.add_drafts(chunk.start + 1, num_fitting)
            self.chunks[place] = ScheduledChunk(
                request.request_id,
                chunk.start,
                1 + num_fitting,
                self._kv.block_ids(request),
                1 + num_fitting,
                "verify",
                draft_token_ids=tuple(draft.token_ids[:num_fitting]),
                drafter=draft.drafter,
                window_block_ids=self._kv.window_tables([request])[0],
                given=chunk.given,
            )
        return has_room

    def add_given(self, request: Request, num_more: int) -> None:
        """Add a stream's next token and the tokens given after it, as far as the step holds them.

        Args:
            num_more: tokens that other streams may still add.
        """
        wanted = request.num_remaining_tokens
        room = max(1, self._budget.most_tokens - self.shape.num_tokens - num_more)
        ended_by: EndedBy = "prompt_end" if room >= wanted else "token_budget"
        if not self.add_prefill(request, min(wanted, room), ended_by):
            self.add_prefill(request, 1, "token_budget")  # it has blocks for its next token

    def add_prefill(self, request: Request, num_tokens: int, ended_by: EndedBy) -> bool:
        """Add the next tokens of a prompt that has blocks for all of it.

        Returns:
            False, and nothing has changed, if blocks of windows are lacking: steps in flight keep
            those of requests that have ended.
        """
        assert request not in self, "a request has one chunk"
        if not self._kv.reserve_chunk(request, num_tokens):
            return False
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
            ended_by,
            window_block_ids=self._kv.window_tables([request])[0],
            given=_given(request) if request.num_given_tokens else None,
        )
        self._places[request.request_id] = len(self.chunks)
        self.shape.add(chunk)
        self.chunks.append(chunk)
        request.num_scheduled_tokens += num_tokens
        request.num_expected_tokens += chunk.num_samples
        return True


def _given(request: Request) -> GivenTokens:
    start = request.num_tokens - request.num_given_tokens
    return GivenTokens(start, tuple(request.token_ids[start:]))
