"""Assigns slots to requests for the states of recurrent layers."""

from collections.abc import Sequence

import msgspec

from legato.core.plan import FIRST_STATE, ZERO_STATE, ChunkResult, ScheduledChunk, StateChange

CHUNK_MULTIPLE = 64
"""Recurrences are computed in chunks that end at multiples of this position, so a request cut
there has bitwise the same states as one that is not cut."""


class _Ring:
    """The slots of one request, which its steps write one after the other.

        [current][written by step n][written by step n + 1] ...

    Attributes:
        number: of the ring; decides which slots it has.
        current: index of the slot with the state after all steps that have landed.
        num_in_flight: steps that write to the slots after it.
        is_written: whether any step has landed; before that, the state is zero.
    """

    __slots__ = ("current", "is_written", "num_in_flight", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.current = 0
        self.num_in_flight = 0
        self.is_written = False


class StateSlots:
    """State slots of the running requests: for each, one more than steps may be in flight.

    A step reads the slot that the step before it wrote, and writes the next one of its request.
    A slot becomes current only when its step has landed. So after a failed step, or a withdrawn
    one, the state is what it was, and the step may be computed again, whole or in parts.

    Slots of a request that ended are free at once, though a step in flight may still write to
    them: steps run in order, and a request's first chunk reads zeros.

    Args:
        num_requests: most requests with slots at once.
        depth: most steps in flight.
    """

    def __init__(self, num_requests: int, depth: int) -> None:
        self.num_requests = num_requests
        self.slots_per_request = depth + 1
        self._free = list(range(num_requests - 1, -1, -1))  # numbers of rings
        self._rings: dict[str, _Ring] = {}  # key request id

    @property
    def num_slots(self) -> int:
        """All slots, the special ones of `legato.core.plan` included."""
        return FIRST_STATE + self.num_requests * self.slots_per_request

    @property
    def num_free(self) -> int:
        """Requests for which there are slots."""
        return len(self._free)

    def begin(self, request_id: str) -> None:
        """Give slots to a request; there must be some."""
        assert request_id not in self._rings, "a request has slots once"
        self._rings[request_id] = _Ring(self._free.pop())

    def release(self, request_id: str) -> None:
        """Free a request's slots; a request without slots is ignored."""
        ring = self._rings.pop(request_id, None)
        if ring is not None:
            self._free.append(ring.number)

    def assigned(self, chunks: Sequence[ScheduledChunk]) -> tuple[ScheduledChunk, ...]:
        """Return a step's chunks with the slots that they read and write."""
        return tuple(
            msgspec.structs.replace(chunk, state=self._advance(self._rings[chunk.request_id]))
            for chunk in chunks
        )

    def withdraw(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Undo `assigned`, for the newest step in flight."""
        for chunk in chunks:
            ring = self._rings.get(chunk.request_id)
            if ring is not None:
                ring.num_in_flight -= 1

    def land(self, chunk: ScheduledChunk, result: ChunkResult | None) -> ChunkResult | None:
        """Record the result of a request's oldest chunk in flight, None for a fault; return it.

        A state is that before or after a chunk, never inside it. So if not all of a chunk counts,
        none of it does, and it is computed again.
        """
        ring = self._rings[chunk.request_id]
        if result is not None and result.num_tokens == chunk.num_tokens:
            ring.current = (ring.current + 1) % self.slots_per_request
            ring.num_in_flight -= 1
            ring.is_written = True
            return result
        ring.num_in_flight = 0
        return None if result is None else msgspec.structs.replace(result, num_tokens=0)

    def borrow(self, count: int) -> list[StateChange]:
        """Return slots that no request has, for steps of a calibration; fewer if there are few."""
        return [
            StateChange(self._slot(number, 0), self._slot(number, 1))
            for number in self._free[-count:]
        ]

    def _advance(self, ring: _Ring) -> StateChange:
        read = ring.current + ring.num_in_flight
        ring.num_in_flight += 1
        assert ring.num_in_flight < self.slots_per_request, "more steps in flight than slots"
        is_first = not ring.is_written and ring.num_in_flight == 1
        source = ZERO_STATE if is_first else self._slot(ring.number, read)
        return StateChange(source, self._slot(ring.number, read + 1))

    def _slot(self, number: int, index: int) -> int:
        return FIRST_STATE + number * self.slots_per_request + index % self.slots_per_request
