"""Assigns slots to requests for the states of recurrent layers, and keeps some as checkpoints."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain

import msgspec

from legato.core.plan import (
    FIRST_STATE,
    STATES,
    ZERO_STATE,
    BlockMove,
    ChunkResult,
    ScheduledChunk,
    StateChange,
)
from legato.kv.checkpoints import Checkpoints, StateCheckpoint
from legato.kv.prefix_node import Way

CHUNK_MULTIPLE = 64
"""Recurrences are computed in chunks that end at multiples of this position, so a request cut
there has bitwise the same states as one that is not cut."""


class CheckpointEnds:
    """Numbers of tokens of a prompt after which a chunk ends and its state is worth keeping.

    These are multiples of `spacing`, the end of the cached path where the prompt leaves it, and the
    last end before its last token. All but the first are rounded down to a multiple of `unit`, and
    none is within `unit` tokens of the hit that the prompt begins after.

    Args:
        way: the hit.
        num_tokens: tokens of the prompt; 0 if no request is likely to begin near its end.
        needed: one more end, wherever the hit is; None if there is none.
    """

    def __init__(
        self, way: Way, num_tokens: int, *, unit: int, spacing: int, needed: int | None = None
    ) -> None:
        self._needed = needed or 0
        self._first = way.num_tokens + unit
        self._spacing = spacing
        self._others = {end // unit * unit for end in (way.num_matched_tokens, num_tokens - 1)}

    def __contains__(self, num_tokens: int) -> bool:
        return (
            num_tokens % self._spacing == 0
            or num_tokens in self._others
            or num_tokens == self._needed
        )

    def add(self, num_tokens: int) -> None:
        """Add an end, for a prompt that will leave this one there."""
        self._others.add(num_tokens)

    def after(self, num_tokens: int) -> int:
        """Return the next end."""
        start = max(num_tokens, self._first - 1)
        ends = [(start // self._spacing + 1) * self._spacing]
        ends += [end for end in self._others if end > start]
        ends += [self._needed] if self._needed > num_tokens else []
        return min(ends)


class _Line:
    """The slots of one request, which its steps write one after the other.

        [current] [written by step n] [written by step n + 1] ...

    Attributes:
        ends: where its checkpoints stay.
        current: slot with the state after all steps that have landed.
        num_tokens: tokens up to that state.
        checkpoint: the checkpoint in that slot; None if the slot is the request's own, or zeros.
        passed: end of the last block inside the last chunk, and the slot of the state there; None
            if that state is gone.
        written: slots that each step in flight writes, in order, the oldest step first.
        rolling: the checkpoint that it gives up when it keeps the next one.
        num_kept_tokens: tokens up to the last checkpoint on its path that stays.
    """

    __slots__ = (
        "checkpoint",
        "current",
        "ends",
        "num_kept_tokens",
        "num_tokens",
        "passed",
        "rolling",
        "written",
    )

    def __init__(self, ends: CheckpointEnds) -> None:
        self.ends = ends
        self.current = ZERO_STATE
        self.num_tokens = 0
        self.checkpoint: StateCheckpoint | None = None
        self.passed: tuple[int, int] | None = None
        self.written: deque[list[int]] = deque()
        self.rolling: StateCheckpoint | None = None
        self.num_kept_tokens = 0


class StateSlots:
    """State slots of the running requests: for each, one more than steps may be in flight.

    A step reads the slot that the step before it wrote, and writes a free one. A slot becomes
    current only when its step has landed. So after a failed step, or a withdrawn one, the state is
    what it was, and the step may be computed again, whole or in parts. A chunk with drafts writes
    the state after each of its rows, and the state after the last right draft becomes current.

    A slot that is kept as a checkpoint is not free when its request goes on. A request keeps its
    state at each end of a block where it stands, or the last one that its drafts went past, in
    place of the one that it kept before, unless that one is at one of its `CheckpointEnds` or
    another request has begun there. Checkpoints have all slots that requests do not need, and
    `num_spare_slots` in any case.

    Slots of a request that ended are free at once, though a step in flight may still write to
    them: steps run in order, so a later step that reads such a slot reads a later state.

    Args:
        num_requests: most requests with slots at once.
        depth: most steps in flight.
        block_size: tokens of a block of the tree; None if no state is kept. Also an attribute.
        num_spare_slots: slots that requests never need.
        unit: tokens at whose multiples checkpoints of prompts are kept; a multiple of a block.
        spacing: tokens between checkpoints within a prompt; a multiple of `unit`.
        num_host_slots: evicted checkpoints that host memory can keep, also an attribute. None with
            several steps in flight: a checkpoint could come back to a slot that one of them writes.

    Attributes:
        checkpoints: states that are kept for later requests.
    """

    def __init__(
        self,
        num_requests: int,
        depth: int,
        *,
        block_size: int | None = None,
        num_spare_slots: int = 0,
        unit: int = CHUNK_MULTIPLE,
        spacing: int = CHUNK_MULTIPLE,
        num_host_slots: int = 0,
    ) -> None:
        assert spacing % unit == 0
        assert depth == 1 or not num_host_slots
        self.num_requests = num_requests
        self.slots_per_request = depth + 1
        self.num_spare_slots = num_spare_slots
        self.unit = unit
        self.spacing = spacing
        self.num_host_slots = num_host_slots
        self.checkpoints = Checkpoints(num_host_slots)
        self.block_size = block_size
        self._num_held = 0
        self._free = list(range(self.num_slots - 1, FIRST_STATE - 1, -1))
        self._lines: dict[str, _Line] = {}  # key request id

    @property
    def num_slots(self) -> int:
        """All slots, the special ones of `legato.core.plan` included."""
        return FIRST_STATE + self.num_requests * self.slots_per_request + self.num_spare_slots

    @property
    def num_free(self) -> int:
        """Requests for which there are slots."""
        return self.num_requests - len(self._lines)

    @property
    def num_draft_slots(self) -> int:
        """Drafts that a step may have: the slots of requests that do not run.

        Checkpoints have these slots meanwhile.
        """
        return self.num_free * self.slots_per_request

    def ends(self, way: Way, num_tokens: int, needed: int | None = None) -> CheckpointEnds:
        """Return where a prompt that begins after a hit has checkpoints; see `CheckpointEnds`."""
        return CheckpointEnds(way, num_tokens, unit=self.unit, spacing=self.spacing, needed=needed)

    def ends_of(self, request_id: str) -> CheckpointEnds:
        """Return where a request that has slots has checkpoints."""
        return self._lines[request_id].ends

    def begin(self, request_id: str, ends: CheckpointEnds) -> None:
        """Give slots to a request, whose state is zero; there must be some."""
        assert request_id not in self._lines, "a request has slots once"
        assert self.num_free, "too many requests"
        self._lines[request_id] = _Line(ends)

    def restore(self, request_id: str, key: int, num_tokens: int) -> None:
        """Let a request go on after a block's checkpoint; no chunk of it may be in flight.

        Args:
            num_tokens: tokens up to the checkpoint.
        """
        line = self._lines[request_id]
        assert not line.written, "a step in flight would go on from another state"
        self._leave(line)
        line.checkpoint = self.checkpoints.use(key, self._take_slot)
        assert line.checkpoint.slot is not None
        line.current, line.num_tokens = line.checkpoint.slot, num_tokens
        line.num_kept_tokens = num_tokens

    def release(self, request_id: str) -> None:
        """Free a request's slots; a request without slots is ignored."""
        line = self._lines.pop(request_id, None)
        if line is not None:
            self._leave(line)
            self._free += chain.from_iterable(line.written)

    def assigned(self, chunks: Sequence[ScheduledChunk]) -> tuple[ScheduledChunk, ...]:
        """Return a step's chunks with the slots that they read and write.

        There must be slots for all drafts (`num_draft_slots`).
        """
        return tuple(
            msgspec.structs.replace(
                chunk,
                state=self._advance(self._lines[chunk.request_id], len(chunk.draft_token_ids)),
            )
            for chunk in chunks
        )

    def withdraw(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Undo `assigned`, for the newest step in flight."""
        for chunk in chunks:
            line = self._lines.get(chunk.request_id)
            if line is not None and line.written:
                self._free += line.written.pop()

    def withdraw_all(self) -> None:
        """Undo `assigned` for all steps in flight."""
        for line in self._lines.values():
            self._free += chain.from_iterable(line.written)
            line.written.clear()

    def land(self, chunk: ScheduledChunk, result: ChunkResult | None) -> ChunkResult | None:
        """Record the result of a request's oldest chunk in flight, None for a fault; return it.

        A state is that before or after a chunk, or after one of its drafts. So if a chunk counts up
        to another row, none of it does, and it is computed again.
        """
        line = self._lines[chunk.request_id]
        kept = line.written[0] if line.written else []  # an earlier one does not count
        num_counted = 0 if result is None else result.num_tokens
        place = num_counted - 1 - (chunk.num_tokens - len(kept))
        if place >= 0:
            self._leave(line)
            del line.written[0]
            line.current, line.checkpoint = kept.pop(place), None
            line.num_tokens = chunk.start + num_counted
            num_after = line.num_tokens % (self.block_size or 1)
            if 0 < num_after <= place:
                line.passed = line.num_tokens - num_after, kept.pop(place - num_after)
            self._free += kept
            return result
        self._free += chain.from_iterable(line.written)
        line.written.clear()
        return None if result is None else msgspec.structs.replace(result, num_tokens=0)

    def keep(self, request_id: str, key: int, num_tokens: int) -> None:
        """Keep a request's state after `num_tokens` tokens, the end of a block of the tree.

        Nothing happens if that state is gone, or is kept already.
        """
        line = self._lines[request_id]
        passed, line.passed = line.passed, None
        if line.num_tokens == num_tokens:
            if line.checkpoint is None:  # otherwise it began here, or none of its last chunk counts
                line.checkpoint = self._kept(line, key, num_tokens, line.current)
        elif passed is not None:
            end, slot = passed
            checkpoint = self._kept(line, key, num_tokens, slot) if end == num_tokens else None
            if checkpoint is None:
                self._free.append(slot)
            else:
                self.checkpoints.let_go(checkpoint)

    def hold(self, key: int) -> StateCheckpoint | None:
        """Keep a block's checkpoint for a transfer; None if it is spilled or no slot is spare."""
        if self._num_held == self.num_spare_slots or key not in self.checkpoints.slots:
            return None
        self._num_held += 1
        return self.checkpoints.use(key, self._take_slot)

    def receive(self) -> int | None:
        """Take a slot for a state from another engine; None if no slot is spare."""
        if self._num_held == self.num_spare_slots:
            return None
        self._num_held += 1
        return self._take_slot()

    def keep_received(self, key: int, slot: int, num_tokens: int) -> StateCheckpoint | None:
        """Keep a received state after `num_tokens` tokens, unless its block has a checkpoint."""
        if key in self.checkpoints:
            return None
        checkpoint = StateCheckpoint(key, slot, num_tokens)
        self.checkpoints.add(checkpoint)
        return checkpoint

    def end_hold(self, checkpoint: StateCheckpoint | None, slot: int | None) -> None:
        """Undo `hold` or `receive`, whose checkpoint and slot these are."""
        self._num_held -= 1
        if checkpoint is not None:
            self.checkpoints.let_go(checkpoint)
        elif slot is not None:
            self._free.append(slot)

    def forget(self, keys: Iterable[int]) -> None:
        """Free the checkpoints of blocks that leave the tree."""
        self._free += self.checkpoints.forget(keys)

    def take_moves(self) -> list[BlockMove]:
        """Return the copies to and from the host's memory to make, in order, before the step."""
        return self.checkpoints.spilled.take_moves(STATES)

    def borrow(self, count: int) -> list[StateChange]:
        """Return free slots for steps of a calibration, which ends before a request comes.

        Args:
            count: how many changes; there are fewer if few slots are free.
        """
        free = self._free[-2 * count :]
        return [StateChange(*pair) for pair in zip(free[::2], free[1::2], strict=False)]

    def _advance(self, line: _Line, num_drafts: int) -> StateChange:
        assert len(line.written) + 1 < self.slots_per_request, "more steps in flight than slots"
        source = line.written[-1][-1] if line.written else line.current
        slots = [self._take_slot() for _ in range(num_drafts + 1)]
        line.written.append(slots)
        return StateChange(source, slots[-1], tuple(slots[:-1]))

    def _kept(self, line: _Line, key: int, num_tokens: int, slot: int) -> StateCheckpoint | None:
        """Keep a request's state in a slot; None if the block has a checkpoint already."""
        rolling, line.rolling = line.rolling, None
        checkpoint: StateCheckpoint | None = None
        if key not in self.checkpoints:
            checkpoint = StateCheckpoint(key, slot, num_tokens - line.num_kept_tokens)
            self.checkpoints.add(checkpoint)
            if num_tokens not in line.ends:
                line.rolling = checkpoint
        if line.rolling is None:
            line.num_kept_tokens = num_tokens
        if rolling is not None:
            # After the new one is there: routers are told at no time that nothing is cached.
            free = self.checkpoints.drop(rolling)
            if free is not None:
                self._free.append(free)
        return checkpoint

    def _take_slot(self) -> int:
        return self._free.pop() if self._free else self.checkpoints.evict()

    def _leave(self, line: _Line) -> None:
        """Give up a request's current slot, and the one of the state that it passed."""
        if line.passed is not None:
            self._free.append(line.passed[1])
            line.passed = None
        if line.checkpoint is not None:
            self.checkpoints.let_go(line.checkpoint)
        elif line.current != ZERO_STATE:
            self._free.append(line.current)
