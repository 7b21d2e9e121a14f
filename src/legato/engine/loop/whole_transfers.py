"""Transfers of whole prompts, for caches with windows or states.

A window's blocks and a state are those at one token alone, so blocks cannot be used as they come:
a request waits until all of its prompt has arrived, and then begins with a hit like any other.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from legato.core.kv_transfer import BlocksArrived, FetchBlocks, SendBlocks
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AbortRequest, AddRequest, Event, Request
from legato.core.slo import SloClass
from legato.core.stats import TransferStats
from legato.core.step_record import BlocksFetched
from legato.engine.loop.transfers import COMPLETE, Transfers
from legato.kv.handovers import Handover
from legato.kv.hold import prompt_digest
from legato.kv.manager import KVCacheManager
from legato.transfer.transport import StuckFetch, Transport


class _Fetched(NamedTuple):
    """A prompt that is fetched for a request.

    Attributes:
        digest: of the prompt; see `prompt_digest`.
        begun_s: when the fetch began; infinite before.
    """

    message: AddRequest
    handover: Handover
    digest: bytes
    begun_s: float = math.inf


class WholeTransfers(Transfers):
    """Holds requests back from the scheduler while their prompts are fetched.

    The scheduler sees requests that fetch nothing. A prompt that is sent is offered once it is
    computed, and is kept until it was read.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        transport: Transport,
        await_copies: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(kv, transport, await_copies)
        self._taken: list[_Fetched] = []  # fetches to begin after copies
        self._arriving: dict[str, _Fetched] = {}  # key request id
        # Key the digest of a prompt whose fetch may end well, value the requests that wait for it.
        self._followers: dict[bytes, list[AddRequest]] = {}
        self._held_back: set[str] = set()  # ids of requests that have neither begun nor ended
        self._ready: list[AddRequest] = []  # whose prompts have arrived, or will not
        self._computing: dict[str, AddRequest] = {}  # key request id, of prompts to be sent
        self._offered: dict[str, Handover | None] = {}  # key transfer id; None until computed
        self._unfinished: list[StuckFetch] = []  # reads that may still write

    @property
    def is_waiting(self) -> bool:
        return bool(self._taken or self._arriving or self._offered or self._unfinished)

    @property
    def has_news(self) -> bool:
        transport = self._transport
        is_freed = any(one.is_over for one in self._unfinished)
        return bool(
            self._ready or transport.has_arrived or transport.exports.has_released or is_freed
        )

    @property
    def stats(self) -> TransferStats:
        return msgspec.structs.replace(super().stats, num_leases=len(self._offered))

    def note_events(self, events: Iterable[Event]) -> None:
        """Do nothing: see `hold_back`."""

    def hold_back(self, events: Sequence[Event]) -> tuple[list[Event], list[RequestOutput]]:
        """Return the events for the scheduler, and the ends of requests that ended here."""
        passed: list[Event] = []
        outputs: list[RequestOutput] = []
        for event in events:
            if isinstance(event, AddRequest) and event.kv_transfer is not None:
                passed += self._take(event)
            elif isinstance(event, AbortRequest) and event.request_id in self._held_back:
                self._held_back.remove(event.request_id)
                outputs.append(
                    RequestOutput(request_id=event.request_id, finish_reason=FinishReason.ABORT)
                )
            else:
                passed.append(event)
        return passed, outputs

    def begin(self, now_s: float) -> None:
        """Begin to fetch prompts, after the executor was given all copies."""
        if self._taken:
            self._await_copies()
        while self._taken:
            fetched = self._taken.pop(0)._replace(begun_s=now_s)
            what = f"the transfer of {fetched.message.request_id}"
            with self.containment.containing(what, partial(self._decline, fetched)):
                self._fetch(fetched)

    def _fetch(self, fetched: _Fetched) -> None:
        message, handover = fetched.message, fetched.handover
        assert isinstance(message.kv_transfer, FetchBlocks)
        self._arriving[message.request_id] = fetched
        self._transport.fetch(
            message.request_id,
            message.kv_transfer,
            self._kv.handovers.places(handover)[handover.num_found :],
            start=handover.num_found * self._kv.block_size,
            prompt_digest=fetched.digest,
        )

    def _decline(self, fetched: _Fetched, _: Exception) -> None:
        """Let the requests begin that waited for a fetch, which did not begin."""
        request_id = fetched.message.request_id
        self._arriving.pop(request_id, None)
        nothing = BlocksArrived(request_id=request_id, num_tokens=0, is_over=True)
        self._finish(nothing, fetched, fetched.begun_s)
        self._kv.handovers.let_go(fetched.handover)

    def publish(self) -> None:
        """Do nothing: a prompt is offered when its request ends."""

    def note_ends(self, outputs: Iterable[RequestOutput]) -> None:
        """Offer prompts that are complete, and give the others up."""
        for output in outputs:
            if output.finish_reason is None:
                continue
            self._held_back.discard(output.request_id)
            if output.request_id not in self._computing:
                continue
            message = self._computing.pop(output.request_id)
            assert isinstance(message.kv_transfer, SendBlocks)
            transfer_id, exports = message.kv_transfer.transfer_id, self._transport.exports
            handover: Handover | None = None
            if output.finish_reason in COMPLETE and transfer_id in self._offered:
                handover = self._kv.handovers.send(_request(message))
            if handover is None:
                exports.give_up(transfer_id)
            else:
                self._await_copies()  # its blocks may be on their way from host memory
                self._offered[transfer_id] = handover
                exports.grow(transfer_id, self._kv.handovers.places(handover))
                exports.complete(transfer_id)

    def take_arrived(self, now_s: float) -> Sequence[Event]:
        containing, let_go = self.containment.containing, self._kv.handovers.let_go
        for transfer_id in self._transport.exports.take_released():
            with containing(f"the release of the transfer {transfer_id}"):
                self._release(transfer_id)
        for one in [one for one in self._unfinished if one.is_over]:
            self._unfinished.remove(one)
            with containing(f"the end of the read for {one.end.request_id}"):
                let_go(self._arriving.pop(one.end.request_id).handover)
        for event in self._transport.take_arrived():
            if event.is_over and event.request_id in self._arriving:
                fetched = self._arriving.pop(event.request_id)
                self._finish(event, fetched, now_s)
                with containing(f"the end of the fetch of {event.request_id}"):
                    let_go(fetched.handover)
        for one in self._transport.take_stuck():
            # The places stay until nothing writes to them any more.
            self._finish(one.end, self._arriving[one.end.request_id], now_s)
            self._unfinished.append(one)
        ready, self._ready = self._ready, []
        return ready

    def _release(self, transfer_id: str) -> None:
        handover = self._offered.pop(transfer_id)
        if handover is not None:
            self._kv.handovers.let_go(handover)

    def _take(self, message: AddRequest) -> list[Event]:
        """Begin a request's transfer; return it for the scheduler unless it must wait."""
        match message.kv_transfer:
            case SendBlocks(transfer_id):
                if self._transport.exports.begin(transfer_id, prompt_digest(message)):
                    self._offered[transfer_id] = None
                    self._computing[message.request_id] = message
                return [message]
            case FetchBlocks() as source:
                digest = prompt_digest(message)
                if digest in self._followers:
                    self._held_back.add(message.request_id)
                    self._followers[digest].append(message)
                    return []
                handover = self._kv.handovers.receive(_request(message))
                if handover is not None:
                    self._held_back.add(message.request_id)
                    self._taken.append(_Fetched(message, handover, digest))
                    self._followers[digest] = []
                    return []
                self._transport.decline(source, digest)
        return [msgspec.structs.replace(message, kv_transfer=None)]

    def _finish(self, event: BlocksArrived, fetched: _Fetched, now_s: float) -> None:
        """Keep what has arrived if it is all of a prompt, and let its request begin."""
        with self.containment.containing(f"the arrival of {event.request_id}"):
            self._keep(event, fetched, now_s)
        followers = self._followers.pop(fetched.digest, [])
        for message in (fetched.message, *followers):
            if message.request_id in self._held_back:
                self._held_back.remove(message.request_id)
                self._ready.append(msgspec.structs.replace(message, kv_transfer=None))
        for message in followers:
            assert isinstance(message.kv_transfer, FetchBlocks)
            with self.containment.containing(f"the transfer of {message.request_id}"):
                self._transport.decline(message.kv_transfer, fetched.digest)

    def _keep(self, event: BlocksArrived, fetched: _Fetched, now_s: float) -> None:
        handover, size = fetched.handover, self._kv.block_size
        num_places = len(self._kv.handovers.places(handover))
        is_whole = event.num_tokens == num_places * size
        if is_whole:
            self._kv.handovers.keep(handover)
        num_wanted = (handover.num_blocks - handover.num_found) * size
        self._note_fetched(
            BlocksFetched(
                request_id=event.request_id,
                begun_s=fetched.begun_s,
                ended_s=now_s,
                num_tokens=num_wanted if is_whole else 0,
                num_wanted_tokens=num_wanted,
            )
        )


def _request(message: AddRequest) -> Request:
    """Return a request as the KV manager looks it up."""
    return Request(message, SloClass(), len(message.prompt_token_ids) + 1)
