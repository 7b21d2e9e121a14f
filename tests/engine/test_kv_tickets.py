"""What a request may say of its prompt's blocks and other engines."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from legato.core.cache_config import TransferConfig
from legato.core.errors import ConfigError, InvalidRequestError
from legato.core.kv_transfer import FetchBlocks
from legato.engine.client.kv_tickets import KVTransferParams, Tickets
from legato.engine.process.engine_messages import TransferAddress

DECODES = TransferConfig(kv_role="decode")
OWN = TransferAddress("127.0.0.1", 0)


def asked(host: str, port: int) -> KVTransferParams:
    return KVTransferParams(
        do_remote_prefill=True, remote_host=host, remote_port=port, transfer_id="a"
    )


def test_without_a_key_the_default_prefill_server_of_this_machine_is_asked() -> None:
    told = Tickets(TransferConfig(kv_role="prefill"), TransferAddress("127.0.0.1", 5600))
    prefilled = told.transfer(KVTransferParams(do_remote_decode=True, transfer_id="a"))
    ticket = told.answer_params(prefilled)
    assert ticket is not None
    assert Tickets(DECODES, OWN).transfer(ticket) == FetchBlocks("a", "127.0.0.1", 5600)


@given(
    host=st.sampled_from(["127.0.0.1", "127.0.0.2", "localhost", "::1", "10.0.0.1", "x.example"]),
    port=st.integers(1, 65535),
)
@example(host="127.0.0.1", port=22)
@example(host="127.0.0.1", port=5600)
@example(host="::1", port=7)
def test_without_a_key_a_client_reaches_only_peers(host: str, port: int) -> None:
    peers = ("127.0.0.1:5600", "[::1]:7")
    tickets = Tickets(msgspec.structs.replace(DECODES, kv_transfer_peers=peers), OWN)
    if (host, port) in (("127.0.0.1", 5600), ("::1", 7)):
        assert tickets.transfer(asked(host, port)) == FetchBlocks("a", host, port)
    else:
        with pytest.raises(InvalidRequestError, match=r"another machine|--kv-transfer-peers"):
            tickets.transfer(asked(host, port))


def test_a_fleets_own_router_names_any_engine_of_this_machine() -> None:
    tickets = Tickets(DECODES, OWN, is_from_router=True)
    assert tickets.transfer(asked("127.0.0.1", 4242)) == FetchBlocks("a", "127.0.0.1", 4242)
    with pytest.raises(InvalidRequestError, match="another machine"):
        tickets.transfer(asked("10.0.0.1", 4242))


@pytest.mark.parametrize(
    "peer", ["", "5600", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "a:1", "::1"]
)
def test_peers_are_on_this_machine(peer: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT on this machine"):
        TransferConfig(kv_transfer_peers=(peer,))
