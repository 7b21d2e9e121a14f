"""What engines, routers and fleets listen on: this machine, or else wherever they share a key."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from legato.api.config import ServerConfig
from legato.core.addresses import is_loopback
from legato.core.cache_config import TransferConfig
from legato.core.errors import ConfigError
from legato.transfer.keys import read_key
from legato_fleet.exposure import check_reach

OWN = ["127.0.0.1", "127.8.8.8", "::1", "localhost", "LOCALHOST"]
OTHERS = ["0.0.0.0", "::", "10.0.0.1", "prefill", "localhost.evil.example", "", "127.0.0.1.", "*"]


def test_which_addresses_are_this_machines() -> None:
    assert all(map(is_loopback, OWN))
    assert not any(map(is_loopback, OTHERS))


@pytest.mark.parametrize(
    "endpoint",
    [
        *(f"tcp://{host}:5557" for host in OTHERS),
        *("tcp://eth0:5557", "tcp://127.0.0.1:5557;0.0.0.0:5557", "tcp://127.0.0.1:5557\n"),
        *("udp://127.0.0.1:5557", "pgm://127.0.0.1;224.0.0.1:5557", "ws://127.0.0.1:5557", ""),
    ],
)
def test_what_is_cached_is_told_to_this_machine_alone(endpoint: str) -> None:
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        whole = {"kv_events_endpoint": "tcp://127.0.0.1:1"} | {name: endpoint}
        with pytest.raises(ConfigError, match=f"{name} is on this machine"):
            ServerConfig(**whole)


@pytest.mark.parametrize("host", OTHERS)
def test_blocks_are_sent_beyond_this_machine_with_a_key_alone(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a --kv-transfer-key-file"):
        read_key(TransferConfig(kv_role="prefill", kv_transfer_host=host))
    for kept, why in ((None, "cannot read"), (b"too short", "needs 16 bytes"), (b"", "needs 16")):
        key = tmp_path / "key"
        if kept is not None:
            key.write_bytes(kept)
        config = TransferConfig(kv_transfer_host=host, kv_transfer_key_file=str(key))
        with pytest.raises(ConfigError, match=why):
            read_key(config)


def test_on_this_machine_no_key_is_needed() -> None:
    for host in OWN:
        assert read_key(TransferConfig(kv_role="prefill", kv_transfer_host=host)) == b""


@pytest.mark.parametrize(
    ("address", "token", "tls", "is_open"),
    [
        ("10.0.0.1", False, "", True),
        ("10.0.0.1", False, "0", True),
        ("::", False, "", True),
        ("10.0.0.1", True, "", False),
        ("10.0.0.1", False, "1", False),
        ("127.0.0.1", False, "", False),
    ],
)
def test_a_ray_that_anybody_can_ask_is_refused(
    address: str, token: bool, tls: str, is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, util, raylet = ModuleType("ray"), ModuleType("ray.util"), ModuleType("ray._raylet")
    util.get_node_ip_address = lambda: address  # type: ignore[attr-defined]
    ray.util = util  # type: ignore[attr-defined]
    raylet.AuthenticationMode = type("Mode", (), {"TOKEN": 1})  # type: ignore[attr-defined]
    raylet.get_authentication_mode = lambda: int(token)  # type: ignore[attr-defined]
    for module in (ray, util, raylet):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("RAY_USE_TLS", tls)
    if is_open:
        with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"):
            check_reach()
    else:
        check_reach()
