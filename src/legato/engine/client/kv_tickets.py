"""Requests' parameters for moving a prompt's blocks between engines.

The fields are vLLM's, so that its routers pass them from one engine to the next. Since clients pass
them on, they could make this engine connect anywhere. So a ticket is signed with the engines'
shared key; without a key, it may only name a peer from this engine's configuration.
"""

import hashlib
import hmac
import secrets

import msgspec

from legato.core.addresses import is_loopback
from legato.core.cache_config import KVRole, TransferConfig
from legato.core.errors import InvalidRequestError
from legato.core.kv_transfer import FetchBlocks, KVTransfer, SendBlocks
from legato.engine.process.engine_messages import TransferAddress
from legato.transfer.keys import read_key

_FIELD = "kv_transfer_params"


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Attributes: `is_early`: the other engine may not have received the prompt yet."""

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    remote_host: str | None = None
    remote_port: int | None = None
    transfer_id: str | None = None
    signature: str | None = None
    is_early: bool = False


class Tickets:
    """Reads and writes the parameters of one engine.

    Args:
        address: of the engine; None if it neither sends nor fetches blocks.
        is_from_router: whether all tickets come from a router that chooses engines itself, not from
            clients. Without a key, they may then name any engine on this machine.
    """

    def __init__(
        self,
        config: TransferConfig,
        address: TransferAddress | None,
        *,
        is_from_router: bool = False,
    ) -> None:
        self._role: KVRole | None = config.kv_role
        self._address = address
        self._peers = None if is_from_router else frozenset(config.kv_transfer_peers)
        self._key = b"" if address is None else read_key(config)

    def transfer(self, params: KVTransferParams | None) -> KVTransfer | None:
        """Return how the engine must move blocks; None if it need not.

        Raises:
            InvalidRequestError: the engine cannot, or the ticket is not signed with the key.
        """
        if params is None or not (params.do_remote_decode or params.do_remote_prefill):
            return None
        if params.do_remote_decode and params.do_remote_prefill:
            raise _refused("do_remote_decode and do_remote_prefill exclude each other")
        if params.do_remote_decode:
            self._check_role("prefill")
            return SendBlocks(params.transfer_id or secrets.token_hex(16))
        self._check_role("decode")
        return self._fetched(params)

    def answer_params(self, transfer: KVTransfer | None) -> KVTransferParams | None:
        """The ticket for the engine that decodes; None if there is none."""
        if not isinstance(transfer, SendBlocks):
            return None
        assert self._address is not None
        host, port = self._address.host, self._address.port
        return KVTransferParams(
            do_remote_prefill=True,
            remote_host=host,
            remote_port=port,
            transfer_id=transfer.transfer_id,
            signature=signature(self._key, host, port, transfer.transfer_id),
        )

    def _fetched(self, params: KVTransferParams) -> FetchBlocks:
        host, port, transfer_id = params.remote_host, params.remote_port, params.transfer_id
        if host is None or port is None or transfer_id is None:
            raise _refused("do_remote_prefill goes with remote_host, remote_port and transfer_id")
        if not self._key:
            self._check_peer(host, port)
        shown = (params.signature or "").encode()
        if self._key and not hmac.compare_digest(
            shown, signature(self._key, host, port, transfer_id).encode()
        ):
            raise _refused("the signature is not of an engine that shares this one's key")
        return FetchBlocks(transfer_id, host, port, params.is_early)

    def _check_peer(self, host: str, port: int) -> None:
        if not is_loopback(host):
            raise _refused(f"remote_host {host} is another machine, and engines share no key")
        peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if self._peers is not None and peer not in self._peers:
            raise _refused(
                f"{peer} is none of this server's --kv-transfer-peers, and engines share no key"
            )

    def _check_role(self, needed: KVRole) -> None:
        if self._role not in (needed, "both"):
            raise _refused(f"this server was not started with --kv-role {needed} or both")


def signature(key: bytes, host: str, port: int, transfer_id: str) -> str:
    """Sign a ticket, to prove that an engine or router with the key made it."""
    ticket = msgspec.json.encode([host, port, transfer_id])
    return hmac.digest(key, ticket, hashlib.sha256).hex()


def _refused(why: str) -> InvalidRequestError:
    return InvalidRequestError(why, param=_FIELD)
