"""How the prompt of a request comes from the replica that computes it to the one that continues it.

Both are told at once, so that blocks are fetched while the prompt is still computed. Where replicas
share a key, they believe a ticket that is signed with it.
"""

import secrets

import msgspec

from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.engine.frontend.kv_tickets import KVTransferParams, signature
from legato.fleet.messages import Ticketed
from legato.fleet.placements import Half, Placed

_NOT_SAMPLED = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
"""One token ends a prompt; nobody is sent it."""


def sent_halves(
    request: AddRequest, placed: Placed, key: bytes
) -> list[tuple[Half, AddRequest | Ticketed]]:
    """What replicas are sent for a request, each for its half.

    Args:
        key: that replicas share; empty where they share none.
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
