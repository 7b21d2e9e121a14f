"""What a fleet is made of, as it is asked for."""

import importlib.util
import sys
from typing import Any

import pytest

from legato.core.cache_config import CacheConfig, TransferConfig
from legato.core.config import EngineConfig
from legato.core.errors import ConfigError
from legato_fleet.config import FleetConfig, Pool, check_fleet, replica_config, simulated_program


@pytest.mark.parametrize(
    ("asked", "pools"),
    [
        ({}, [Pool("both", 2, 2)]),
        ({"max_replicas": 5}, [Pool("both", 2, 5)]),
        (
            {"prefill_replicas": 2, "decode_replicas": 3, "max_decode_replicas": 6},
            [Pool("prefill", 2, 2), Pool("decode", 3, 6)],
        ),
    ],
)
def test_a_fleet_is_one_pool_or_two(asked: dict[str, Any], pools: list[Pool]) -> None:
    assert FleetConfig(**asked).pools == pools


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prefill_replicas": 2}, "go together"),
        ({"decode_replicas": 2}, "go together"),
        ({"replicas": 2, "prefill_replicas": 2, "decode_replicas": 2}, "not both"),
        ({"max_replicas": 1}, "at least the 2 replicas"),
        ({"max_prefill_replicas": 4}, "goes with prefill_replicas"),
        ({"max_replicas": 4, "prefill_replicas": 2, "decode_replicas": 2}, "goes with replicas"),
        (
            {"prefill_replicas": 2, "decode_replicas": 2, "max_decode_replicas": 1},
            "at least the 2 decode_replicas",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FleetConfig(**asked)


def test_each_replica_is_given_its_role_and_a_port_of_its_own() -> None:
    config = EngineConfig(transfer=TransferConfig(kv_lease_s=7.0))
    transfer = replica_config(config, "decode", "10.0.0.1").transfer
    assert (transfer.kv_role, transfer.kv_transfer_host) == ("decode", "10.0.0.1")
    assert (transfer.kv_transfer_port, transfer.kv_lease_s) == (0, 7.0)
    assert replica_config(config, "both", "10.0.0.1") is config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(transfer=TransferConfig(kv_role="decode")), "what each replica"),
        (EngineConfig(transfer=TransferConfig(kv_transfer_port=1)), "what each replica"),
        (EngineConfig(cache=CacheConfig(enable_prefix_caching=False)), "prefix cache"),
        (EngineConfig(), "kv_transfer_key_file"),
    ],
)
def test_what_a_fleet_decides_or_lacks(config: EngineConfig, message: str) -> None:
    apart = FleetConfig(prefill_replicas=1, decode_replicas=1)
    with pytest.raises(ConfigError, match=message):
        check_fleet(config, apart, is_on_cluster=True)
    check_fleet(EngineConfig(), apart, is_on_cluster=False)
    check_fleet(EngineConfig(), FleetConfig(), is_on_cluster=True)


def test_the_program_of_a_simulated_engine_is_there() -> None:
    python, option, module, profile = simulated_program("of-a-test")
    assert (python, option, profile) == (sys.executable, "-m", "of-a-test")
    assert importlib.util.find_spec(module) is not None


def test_a_simulated_fleet_needs_the_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato_fleet.config.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'legato-llm\[lab\]'"):
        check_fleet(EngineConfig(), FleetConfig(simulate="of-a-test"), is_on_cluster=False)
