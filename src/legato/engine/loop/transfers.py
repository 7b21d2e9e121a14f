"""Prompts that this engine computes for other engines, or fetches from them."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from legato.core.containment import Containment
from legato.core.kv_transfer import BlocksArrived, FetchBlocks, SendBlocks
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AddRequest, Event
from legato.core.stats import TransferStats
from legato.core.step_record import BlocksFetched
from legato.kv.hold import Hold, prompt_digest
from legato.kv.manager import KVCacheManager
from legato.transfer.transport import StuckFetch, Transport

COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)


class _Fetched(NamedTuple):
    """A fetch of a prompt's blocks that began at `begun_s`."""

    hold: Hold
    begun_s: float


class _Sent:
    """A prompt whose first `num_offered` tokens are offered to another engine."""

    def __init__(self, hold: Hold) -> None:
        self.hold = hold
        self.num_offered = 0


class Transfers:
    """Connects the KV manager, which holds blocks for transfers, with the transport.

    Args:
        await_copies: waits for copies between blocks and host memory, which the executor's `move`
            may only enqueue.

    Attributes:
        containment: records errors of one transfer; its request then computes what it lacks.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        transport: Transport,
        await_copies: Callable[[], object] = lambda: None,
    ) -> None:
        self.containment = Containment()
        self._await_copies = await_copies
        self._kv = kv
        self._new: list[Hold] = []  # of transfers to begin
        self._transport = transport
        self._fetched: dict[str, _Fetched] = {}  # key: request id
        self._stuck: list[StuckFetch] = []  # their requests have no other blocks yet
        self._quarantined: list[StuckFetch] = []
        self._awaited: dict[str, AddRequest] = {}  # key: request id, until the fetch begins
        self._sent: dict[str, _Sent] = {}  # key: transfer id
        self._transfer_ids: dict[str, str] = {}  # key: request id, while it is computed
        self._records: list[BlocksFetched] = []
        self._num_fetched = self._num_recomputed = 0

    @property
    def port(self) -> int:
        """Where other engines ask for blocks; 0 if they cannot."""
        return self._transport.port

    @property
    def is_waiting(self) -> bool:
        """Whether blocks are being fetched, or kept for other engines."""
        return bool(self._fetched or self._sent or self._quarantined)

    @property
    def has_news(self) -> bool:
        """Whether blocks have arrived, or need not be kept any more."""
        transport = self._transport
        if transport.has_arrived or transport.exports.has_released:
            return True
        is_freed = any(one.is_over for one in self._quarantined)
        return is_freed or any(map(self._is_replaceable, self._stuck))

    @property
    def stats(self) -> TransferStats:
        """Counters of fetches and of kept prompts."""
        link = self._transport.link
        return TransferStats(
            num_bytes=link.num_bytes,
            read_s=link.busy_s,
            num_fetched=self._num_fetched,
            num_recomputed=self._num_recomputed,
            num_leases=len(self._sent),
            num_expired=self._transport.exports.num_expired,
        )

    def note_events(self, events: Iterable[Event]) -> None:
        """Note the requests that will fetch blocks once they are admitted."""
        for event in events:
            if isinstance(event, AddRequest) and isinstance(event.kv_transfer, FetchBlocks):
                self._awaited[event.request_id] = event

    def hold_back(self, events: Sequence[Event]) -> tuple[list[Event], list[RequestOutput]]:
        """Return the events for the scheduler, and the ends of requests that ended here.

        The scheduler takes requests at once, and their blocks as they come.
        """
        return [*events], []

    def begin(self, now_s: float) -> None:
        """Begin the transfers of admitted requests, after the executor was given all copies.

        Copies may still read from blocks that a fetch will write to, or write to blocks that other
        engines will read.
        """
        self._new += self._kv.holds.take_new()
        if self._new:
            self._await_copies()
        while self._new:
            hold = self._new.pop(0)
            what = f"the transfer of {hold.request_id}"
            with self.containment.containing(what, partial(self._abandon, hold)):
                self._begin(hold, now_s)

    def _begin(self, hold: Hold, now_s: float) -> None:
        match hold.transfer:
            case FetchBlocks() as source:
                self._awaited.pop(hold.request_id, None)
                self._fetched[hold.request_id] = _Fetched(hold, now_s)
                blocks = hold.blocks(hold.start).tolist()
                self._transport.fetch(
                    hold.request_id,
                    source,
                    blocks,
                    start=hold.start,
                    prompt_digest=hold.prompt_digest,
                )
            case SendBlocks(transfer_id):
                self._send(transfer_id, hold)

    def _abandon(self, hold: Hold, _: Exception) -> None:
        """Go on without a transfer that did not begin: the request's blocks are computed."""
        self._fetched.pop(hold.request_id, None)
        if isinstance(hold.transfer, FetchBlocks):
            self._kv.holds.end_arrival(hold.request_id)
        else:
            self._kv.holds.let_go(hold.request_id)

    def publish(self) -> None:
        """Offer the blocks that the last step computed."""
        for request_id, transfer_id in [*self._transfer_ids.items()]:
            what = f"the offer of {request_id}"
            with self.containment.containing(what, partial(self._give_up, request_id)):
                self._offer(transfer_id)

    def _offer(self, transfer_id: str) -> None:
        sent = self._sent[transfer_id]
        hold = sent.hold
        num_tokens = hold.num_computed_tokens // hold.block_size * hold.block_size
        if num_tokens > sent.num_offered:
            blocks = hold.blocks(sent.num_offered, num_tokens)
            self._transport.exports.grow(transfer_id, blocks)
            sent.num_offered = num_tokens

    def _give_up(self, request_id: str, _: Exception) -> None:
        self._transport.exports.give_up(self._transfer_ids.pop(request_id))

    def note_ends(self, outputs: Iterable[RequestOutput]) -> None:
        """Tell other engines which prompts are complete, and which are not fetched."""
        for output in outputs:
            if output.finish_reason is None:
                continue
            awaited = self._awaited.pop(output.request_id, None)
            if awaited is not None:
                assert isinstance(awaited.kv_transfer, FetchBlocks)
                self._transport.decline(awaited.kv_transfer, prompt_digest(awaited))
            if output.request_id not in self._transfer_ids:
                continue
            transfer_id = self._transfer_ids.pop(output.request_id)
            if output.finish_reason in COMPLETE:
                self._transport.exports.complete(transfer_id)
            else:
                self._transport.exports.give_up(transfer_id)

    def take_arrived(self, now_s: float) -> Sequence[Event]:
        """Return the blocks that arrived, and release blocks that are not kept any more.

        With `WholeTransfers`, return requests that may begin instead of blocks.
        """
        for transfer_id in self._transport.exports.take_released():
            with self.containment.containing(f"the release of the transfer {transfer_id}"):
                self._release(transfer_id)
        # Stuck fetches first: all blocks that arrived before them have been applied by now.
        arrived = self._replace_stuck()
        arrived += self._transport.take_arrived()
        self._stuck += self._transport.take_stuck()
        arrived = [event for event in arrived if event.request_id in self._fetched]
        for event in arrived:
            if event.is_over:
                with self.containment.containing(f"the end of the fetch of {event.request_id}"):
                    self._end(event, now_s)
        return arrived

    def _release(self, transfer_id: str) -> None:
        hold = self._sent.pop(transfer_id).hold
        self._transfer_ids.pop(hold.request_id, None)
        self._kv.holds.let_go(hold.request_id)

    def _replace_stuck(self) -> list[BlocksArrived]:
        """Give requests other blocks, if a stuck read may still write to theirs.

        Returns:
            The ends of their fetches.
        """
        for one in [one for one in self._quarantined if one.is_over]:
            self._quarantined.remove(one)
            self._kv.quarantine.end(one.end.request_id)
        ended: list[BlocksArrived] = []
        for one in tuple(self._stuck):
            is_over = one.is_over
            if is_over or self._kv.quarantine.begin(one.end.request_id):
                self._stuck.remove(one)
                self._quarantined += () if is_over else (one,)
                ended.append(one.end)
        return ended

    def _is_replaceable(self, one: StuckFetch) -> bool:
        return one.is_over or self._kv.quarantine.can_begin(one.end.request_id)

    def take_fetched(self) -> list[BlocksFetched]:
        """Return the records of fetches that ended since the last call."""
        taken, self._records = self._records, []
        return taken

    def close(self) -> None:
        """Stop all reads and writes."""
        self._transport.close()

    def _end(self, event: BlocksArrived, now_s: float) -> None:
        hold, begun_s = self._fetched.pop(event.request_id)
        self._note_fetched(
            BlocksFetched(
                request_id=event.request_id,
                begun_s=begun_s,
                ended_s=now_s,
                num_tokens=event.num_tokens - hold.start,
                num_wanted_tokens=hold.end - hold.start,
            )
        )

    def _note_fetched(self, fetched: BlocksFetched) -> None:
        self._records.append(fetched)
        if fetched.num_tokens == fetched.num_wanted_tokens:
            self._num_fetched += 1
        else:
            self._num_recomputed += 1

    def _send(self, transfer_id: str, hold: Hold) -> None:
        if not self._transport.exports.begin(transfer_id, hold.prompt_digest):
            self._kv.holds.let_go(hold.request_id)  # the transfer id is in use
            return
        self._sent[transfer_id] = _Sent(hold)
        self._transfer_ids[hold.request_id] = transfer_id
