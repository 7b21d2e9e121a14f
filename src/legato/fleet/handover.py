"""Splits a request between the replica that prefills it and the one that decodes it.

Both get it at once, so that blocks are fetched while the prompt is still computed. If replicas
share a key, they trust tickets signed with it.
"""

import secrets

import msgspec

from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.engine.frontend.kv_tickets import KVTransferParams, signature
from legato.fleet.placements import Half, Placed
from legato.fleet.replica_messages import Ticketed

_NOT_SAMPLED = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
"""A prefill ends with one token, which no client gets."""


def sent_halves(
    request: AddRequest, placed: Placed, key: bytes
) -> list[tuple[Half, AddRequest | Ticketed]]:
    """Return the message for each replica of a request, with its half.

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
