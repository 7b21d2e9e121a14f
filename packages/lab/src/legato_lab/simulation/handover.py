"""Transfers of a prompt's blocks from the replica that computes it to the one that decodes."""

from collections import defaultdict
from collections.abc import Callable

import msgspec

from legato.core.kv_transfer import BlocksArrived, FetchBlocks, SendBlocks
from legato.core.request import AddRequest
from legato.kv.hold import Hold
from legato_lab.simulation.link import LinkTraffic
from legato_lab.simulation.replica import SimulatedReplica

_PREFILL_TOKENS = 1

OnArrived = Callable[[SimulatedReplica, BlocksArrived, float], None]
"""Called with a replica, an event for it, and the event's time."""


class _Handover:
    """The transfer of one prompt's blocks.

    Attributes:
        source_hold, target_hold: of its blocks at either end, once they have places there.
        num_computed: tokens computed so far, from the prompt's start.
        num_sent: of these, the tokens that were sent.
    """

    def __init__(self, source: SimulatedReplica, target: SimulatedReplica) -> None:
        self.source = source
        self.target = target
        self.source_hold: Hold | None = None
        self.target_hold: Hold | None = None
        self.num_computed = self.num_sent = 0


class SimulatedHandovers:
    """Sends blocks as soon as they are computed and have places at the target.

    Args:
        token_bytes: of a token's keys and values.
    """

    def __init__(self, traffic: LinkTraffic, token_bytes: float, on_arrived: OnArrived) -> None:
        self._traffic = traffic
        self._token_bytes = token_bytes
        self._on_arrived = on_arrived
        self._open: dict[str, _Handover] = {}  # key: request id
        self._computed_by: defaultdict[str, dict[str, _Handover]] = defaultdict(dict)
        """Key a replica, value the prompts that it computes or has computed; key request id."""

    def begin(
        self, message: AddRequest, source: SimulatedReplica, target: SimulatedReplica
    ) -> tuple[AddRequest, AddRequest]:
        """Return the messages to the two replicas of one request."""
        request_id = message.request_id
        handover = self._open[request_id] = _Handover(source, target)
        self._computed_by[source.replica_id][request_id] = handover
        params = msgspec.structs.replace(message.params, max_tokens=_PREFILL_TOKENS)
        sends = SendBlocks(transfer_id=request_id)
        fetches = FetchBlocks(transfer_id=request_id, host="", port=0, is_early=True)
        return (
            msgspec.structs.replace(message, params=params, kv_transfer=sends),
            msgspec.structs.replace(message, kv_transfer=fetches),
        )

    def note_begun(self, replica: SimulatedReplica, now_s: float) -> None:
        """Note that a replica has begun a step; requests may have got places for blocks in it."""
        for hold in replica.kv.holds.take_new():
            handover = self._open.get(hold.request_id)
            if handover is None:
                replica.kv.holds.let_go(hold.request_id)  # the target did not need it
            elif replica is handover.source:
                handover.source_hold = hold
            else:
                handover.target_hold, handover.num_sent = hold, hold.start
                self._send(handover, now_s)

    def note_landed(self, replica: SimulatedReplica, now_s: float) -> None:
        """Note that a replica has ended a step, and send the blocks computed in it."""
        for handover in [*self._computed_by[replica.replica_id].values()]:
            if handover.source_hold is not None:
                handover.num_computed = handover.source_hold.num_computed_tokens
                self._send(handover, now_s)

    def give_up(self, request_id: str, now_s: float) -> None:
        """Send no more of a prompt; tell its target once the blocks in flight have arrived.

        The target computes the rest, if the request continues.
        """
        handover = self._open.get(request_id)
        if handover is not None:
            self._close(request_id)
            if handover.target_hold is not None:
                self._tell(handover, handover.target_hold, 0, now_s, is_over=True)

    def lose(self, replica: SimulatedReplica, now_s: float) -> None:
        """End all transfers to and from a replica that is gone."""
        for request_id, handover in [*self._open.items()]:
            if replica in (handover.source, handover.target):
                self.give_up(request_id, now_s)
        self._computed_by.pop(replica.replica_id, None)

    def _send(self, handover: _Handover, now_s: float) -> None:
        hold = handover.target_hold
        if hold is None:
            return
        end = max(handover.num_sent, min(handover.num_computed, hold.end))
        num_tokens, is_over = end - handover.num_sent, end == hold.end
        if not (num_tokens or is_over):
            return
        handover.num_sent = end
        self._tell(handover, hold, num_tokens, now_s, is_over=is_over)
        if is_over:
            self._close(hold.request_id)

    def _tell(
        self, handover: _Handover, hold: Hold, num_tokens: int, now_s: float, *, is_over: bool
    ) -> None:
        """Send the blocks of some tokens, and report their arrival."""
        source_id, target_id = handover.source.replica_id, handover.target.replica_id
        num_bytes = num_tokens * self._token_bytes
        at_s = self._traffic.send(source_id, target_id, num_bytes, now_s)
        arrived = BlocksArrived(
            request_id=hold.request_id,
            num_tokens=handover.num_sent,
            read_s=self._traffic.busy_s(num_bytes),
            is_over=is_over,
        )
        self._on_arrived(handover.target, arrived, at_s)

    def _close(self, request_id: str) -> None:
        handover = self._open.pop(request_id)
        del self._computed_by[handover.source.replica_id][request_id]
        if handover.source_hold is not None:
            handover.source.kv.holds.let_go(request_id)
