"""Sends requests to replicas, and to other replicas if these refuse them or are gone."""

import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from legato.core.block_hash import block_hashes
from legato.core.cache_salt import hash_root
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.replica_state import ReplicaState
from legato.core.request import AbortRequest, AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.slo import SloClass
from legato.engine.client.kv_tickets import KVTransferParams, signature
from legato.engine.client.submissions import Unfinished
from legato_fleet.link import Link
from legato_fleet.placements import Half, Placed, Placements
from legato_fleet.replica_messages import Ticketed
from legato_fleet.routing.request import RoutedRequest
from legato_fleet.routing.router import NoReplicaError, Router
from legato_fleet.totals import FleetTotals

_MOST_HASHED_TOKENS = 2**14
"""The most of a prompt hashed to find its cached prefix; each block takes a few microseconds."""
_FAILED = (FinishReason.ERROR, FinishReason.REFUSED)

_NOT_SAMPLED = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
"""A prefill ends with one token, which no client gets."""


class Asked(NamedTuple):
    """Lookups that a dispatcher needs.

    Attributes:
        request: returns an unfinished request by its id; None if it has ended.
        slo: returns the promises of a class of service by its name.
    """

    request: Callable[[str], Unfinished | None]
    slo: Callable[[str], SloClass]


class LostRequests(NamedTuple):
    """The requests of a replica that is gone.

    Attributes:
        ended: cannot be run elsewhere.
        num_rerun: sent to other replicas.
    """

    ended: list[tuple[Unfinished, Placed]]
    num_rerun: int


class Dispatcher:
    """Assigns requests to replicas, and tracks them.

    Args:
        block_size: tokens of replicas' blocks.
        key: shared by the replicas; empty if there is none.
        totals: counts requests that are refused and tried again.

    Attributes:
        placed: requests that were sent and have not ended.
    """

    def __init__(
        self, router: Router, asked: Asked, *, block_size: int, key: bytes, totals: FleetTotals
    ) -> None:
        self.placed = Placements()
        self._router = router
        self._asked = asked
        self._block_size = block_size
        self._key = key
        self._totals = totals
        self._links: dict[str, Link] = {}  # key: id of a replica that has an engine
        self._unplaced: dict[str, AddRequest] = {}  # key: id of a request that waits for a replica

    def send(self, request: AddRequest, refusals: dict[str, float] | None = None) -> None:
        """Send a request to a replica that has not refused it, or wait for one.

        Args:
            refusals: as of `Placed`.
        """
        refusals = refusals or {}
        try:
            placement = self._router.route(
                self._routed(request), time.monotonic(), without=refusals
            )
        except NoReplicaError:
            self._unplaced[request.request_id] = request
            return
        prefill = None if placement.prefill is None else self._links[placement.prefill]
        decode = self._links[placement.decode]
        placed = self.placed.add(request.request_id, decode, prefill, refusals)
        for half, message in sent_halves(request, placed, self._key):
            half.link.put(message)

    def abort(self, request_id: str) -> None:
        """Abort a request, unless it has ended."""
        self._unplaced.pop(request_id, None)
        if request_id in self.placed:
            self._end(request_id)

    def told(self, link: Link, output: RequestOutput) -> RequestOutput | None:
        """Turn a replica's output into the client's; None if the client gets nothing."""
        half = self.placed.half(link, output.request_id)
        if half is None:
            return None
        if half.is_prefill and output.finish_reason not in _FAILED:
            if output.finish_reason is not None:
                self._end_prefill(half)
            return None
        output = msgspec.structs.replace(output, request_id=half.request_id)
        if output.finish_reason is FinishReason.REFUSED:
            return self._refused(half, output)
        self._note(half, output)
        return output

    def note_state(self, link: Link, state: ReplicaState) -> None:
        """Note the state of a replica, which has an engine and so takes requests."""
        replica_id = link.replica_id
        if replica_id not in self._links:
            # Blocks are fetched while the prompt is computed, and so arrive with its end.
            fetch_s = 0.0 if link.role == "decode" else None
            self._router.join(replica_id, link.role, transfer_token_s=fetch_s)
            self._links[replica_id] = link
            if link.line.is_to_end.is_set():
                self._router.drain(replica_id)
        self._router.note_state(replica_id, state, time.monotonic())
        waiting, self._unplaced = self._unplaced, {}
        for request in waiting.values():
            self.send(request)

    def drain(self, link: Link) -> None:
        """Send no new requests to a replica that is about to end."""
        if link.replica_id in self._links:
            self._router.drain(link.replica_id)

    def note_missed(self, link: Link, sent_id: str) -> None:
        """Send a request elsewhere: its replica had no engine for it."""
        half = self.placed.half(link, sent_id)
        if half is None:
            return
        if half.is_prefill:
            self._end_prefill(half)
            return
        one = self._asked.request(half.request_id)
        assert one is not None, "what has ended is placed no more"
        self.placed.end_half(half)
        self._end(half.request_id)
        self.send(one.request)

    def rescue(self) -> int:
        """Rerun elsewhere, once, requests that wait at replicas that have stopped reporting.

        Returns:
            how many.
        """
        num_rerun = 0
        for request_id in self._router.stranded(time.monotonic()):
            one = self._asked.request(request_id)
            if one is None or one.request.is_rerun:
                continue
            self._end(request_id)
            one.request = msgspec.structs.replace(one.request, is_rerun=True)
            self.send(one.request)
            num_rerun += 1
        return num_rerun

    def leave(self, link: Link) -> LostRequests:
        """Rerun elsewhere the lost replica's requests that have no output and were not lost before.

        If it was only computing a prompt, the decoding replica computes the prompt instead.
        """
        if self._links.pop(link.replica_id, None) is not None:
            self._router.leave(link.replica_id, time.monotonic())
        halves = self.placed.at(link)
        for half in halves:
            self.placed.end_half(half)
        lost = [self._drop(half.request_id) for half in halves if not half.is_prefill]
        ended: list[tuple[Unfinished, Placed]] = []
        num_rerun = 0
        for placed in lost:
            one = self._asked.request(placed.decode.request_id)
            if one is None:
                continue
            if one.has_begun or one.request.is_rerun:
                ended.append((one, placed))
                continue
            num_rerun += 1
            one.request = msgspec.structs.replace(one.request, is_rerun=True)
            self.send(one.request)
        return LostRequests(ended, num_rerun)

    def _refused(self, half: Half, output: RequestOutput) -> RequestOutput | None:
        """Return the refusal for the client; None if another replica may take the request."""
        refusals = self.placed.of(half).refusals | {
            half.link.replica_id: output.retry_after_s or 0.0
        }
        self.placed.end_half(half)
        self._end(half.request_id)
        one = self._asked.request(half.request_id)
        role, now_s = half.link.role, time.monotonic()
        if one is None or not self._router.may_try_again(refusals, role, now_s):
            return msgspec.structs.replace(output, retry_after_s=min(refusals.values()))
        self._totals.note_tried_again(one.request.service.tenant)
        self.send(one.request, refusals)
        return None

    def _note(self, half: Half, output: RequestOutput) -> None:
        placed = self.placed.of(half)
        if output.new_token_ids and not placed.num_tokens:
            self._router.note_first_token(half.request_id, time.monotonic())
            self._fetch_no_more(placed)
        placed.num_tokens += len(output.new_token_ids)
        if output.finish_reason is not None:
            self.placed.end_half(half)
            self._end(half.request_id)

    def _fetch_no_more(self, placed: Placed) -> None:
        """Abort the prefill: the decoding replica has computed what was not handed over by now."""
        prefill, placed.prefill = placed.prefill, None
        if prefill is not None and self._end_prefill(prefill):
            _abort(prefill)

    def _end_prefill(self, half: Half) -> bool:
        """End a request's prefill; return whether it was running."""
        is_new = self.placed.end_half(half)
        if is_new:
            self._router.note_prefilled(half.request_id, time.monotonic())
        return is_new

    def _end(self, request_id: str) -> None:
        """End a request everywhere."""
        placed = self._drop(request_id)
        self._router.note_end(request_id, placed.num_tokens, time.monotonic())

    def _drop(self, request_id: str) -> Placed:
        """Abort a request at its replicas."""
        placed = self.placed.end(request_id)
        for half in placed.halves:
            if self.placed.end_half(half):
                _abort(half)
        return placed

    def _routed(self, request: AddRequest) -> RoutedRequest:
        service, block_size = request.service, self._block_size
        prompt = request.prompt_token_ids
        root = hash_root(service.block_salt) if self._router.asks_prefixes else None
        return RoutedRequest(
            request_id=request.request_id,
            num_prompt_tokens=len(prompt),
            slo=self._asked.slo(service.slo_class),
            tenant=service.tenant,
            block_hashes=(
                ()
                if root is None
                else block_hashes(prompt[:_MOST_HASHED_TOKENS], block_size, parent=root)
            ),
            block_size=block_size,
            # Scores and pooled vectors need the whole prompt.
            is_divisible=request.params.prompt_logprobs is None and request.pooling is None,
        )


def _abort(half: Half) -> None:
    half.link.put(AbortRequest(request_id=half.sent_id))


def sent_halves(
    request: AddRequest, placed: Placed, key: bytes
) -> list[tuple[Half, AddRequest | Ticketed]]:
    """Return the message for each replica of a request, with its half.

    The replica that prefills and the one that decodes get theirs at once, so that blocks are
    fetched while the prompt is still computed. If replicas share a key, they trust tickets signed
    with it.

    Args:
        key: shared by the replicas; empty if there is none.
    """
    decode, prefill = placed.decode, placed.prefill
    whole = msgspec.structs.replace(request, request_id=decode.sent_id)
    if prefill is None:
        return [(decode, whole)]
    source = prefill.link.transfer
    assert source is not None, "what prefills tells where it can be asked for blocks"
    transfer_id = secrets.token_hex(16)
    prompt = msgspec.structs.replace(request, request_id=prefill.sent_id, params=_NOT_SAMPLED)
    sends = KVTransferParams(do_remote_decode=True, transfer_id=transfer_id)
    fetches = KVTransferParams(
        do_remote_prefill=True,
        remote_host=source.host,
        remote_port=source.port,
        transfer_id=transfer_id,
        signature=signature(key, source.host, source.port, transfer_id),
        is_early=True,
    )
    return [
        (prefill, Ticketed(request=prompt, ticket=sends)),
        (decode, Ticketed(request=whole, ticket=fetches)),
    ]
