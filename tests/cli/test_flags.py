"""Flags and the settings they make."""

import argparse
import math
from typing import Any

import pytest

from legato.api.config import ServerConfig
from legato.cli.flags import add_engine_flags, add_server_flags, engine_config
from legato.cli.main import main
from legato.cli.values import byte_size
from legato.core.cache_config import CacheConfig
from legato.core.config import EngineConfig, ModelConfig, SchedulerConfig, engine_parts
from legato.core.config_fields import Config, fields_of
from legato.core.errors import ConfigError
from legato.core.slo import SloClass


def config_of(*flags: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    return engine_config(parser.parse_args(flags))


def test_no_flags_are_the_defaults() -> None:
    assert config_of() == EngineConfig()


def test_every_flag_reaches_its_field() -> None:
    config = config_of(
        "--model", "m", "--revision", "r", "--dtype", "float32", "--device", "cpu",
        "--max-model-len", "128", "--num-threads", "3", "--block-size", "8",
        "--kv-cache-memory", "2GiB", "--max-num-batched-tokens", "64", "--max-num-seqs", "4",
        "--num-steps-in-flight", "2", "--max-waiting", "0",
        "--policy", "prefill-first", "--no-enable-chunked-prefill",
    )  # fmt: skip
    assert config == EngineConfig(
        model=ModelConfig(
            model="m",
            revision="r",
            dtype="float32",
            device="cpu",
            max_model_len=128,
            num_threads=3,
        ),
        cache=CacheConfig(block_size=8, kv_cache_memory_bytes=2 * 2**30),
        scheduler=SchedulerConfig(
            policy="prefill-first",
            max_num_batched_tokens=64,
            max_num_seqs=4,
            num_steps_in_flight=2,
            enable_chunked_prefill=False,
            max_waiting=0,
        ),
    )


@pytest.mark.parametrize("config", [*engine_parts().values(), ServerConfig])
def test_every_field_has_a_flag_that_tells_its_default(config: type[Config]) -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    add_server_flags(parser)
    flags = {action.option_strings[0]: action for action in parser._actions}
    for field in fields_of(config):
        if field.flag.behind is not None:
            continue  # it is typed behind another one's value
        action = flags[field.option]
        assert action.dest == field.name
        if field.kind in ("count", "number", "choice") and field.default is not None:
            assert f"(default: {field.default}" in str(action.help)


def test_a_flag_is_named_as_its_field_without_the_unit() -> None:
    given = {
        name: field.option
        for config in (*engine_parts().values(), ServerConfig)
        for field in fields_of(config)
        if (name := field.name).replace("_", "-") != field.option.removeprefix("--")
        and field.flag.behind is None
    }
    assert given == {
        "kv_cache_memory_bytes": "--kv-cache-memory",
        "swap_space_bytes": "--swap-space",
        "kv_lease_s": "--kv-lease",
        "itl_slo_s": "--itl-slo",
        "tpot_slo_s": "--tpot-slo",
        "ttft_slo_s": "--ttft-slo",
        "max_wait_s": "--max-wait",
        "timeout_drain_s": "--timeout-drain",
        "timeout_engine_s": "--timeout-engine",
        "timeout_keep_alive_s": "--timeout-keep-alive",
        "timeout_header_s": "--timeout-header",
        "timeout_body_s": "--timeout-body",
        "timeout_prompt_s": "--timeout-prompt",
        "timeout_write_s": "--timeout-write",
        # Exceptions, stated at the field.
        "slo_classes": "--slo-class",
        "tenant_weights": "--tenant-weight",
        "api_keys": "--api-key",
        "admin_api_keys": "--admin-api-key",
        "served_model_names": "--served-model-name",
        "allowed_hosts": "--allowed-host",
        "max_trace_bytes": "--max-trace-size",
        "max_stored_bytes": "--max-stored-size",
        "max_body_bytes": "--max-body-size",
        "max_header_bytes": "--max-header-size",
    }


def test_classes_add_up() -> None:
    config = config_of("--slo-class", "gold:itl=50ms,ttft=2s", "--slo-class", "slow")
    assert config.scheduler.slo_classes == {
        "gold": SloClass(itl_s=0.05, ttft_s=2.0),
        "slow": SloClass(),
    }


def test_weights_add_up() -> None:
    config = config_of("--tenant-weight", "a=2,b=0.5", "--tenant-weight", "c.d=3")
    assert config.scheduler.tenant_weights == {"a": 2.0, "b": 0.5, "c.d": 3.0}


@pytest.mark.parametrize("text", ["a", "a=", "a=0", "a=-1", "=1", "a b=1", "a=1e9", ","])
def test_weights_that_are_none(text: str) -> None:
    with pytest.raises((SystemExit, ConfigError)):
        config_of("--tenant-weight", text)


def test_a_promise_on_gaps_says_for_how_many() -> None:
    config = config_of("--itl-slo", "120ms:p99.9", "--slo-class", "gold:itl=50ms:p99.99,ttft=2s")
    assert config.scheduler.classes == {
        "interactive": SloClass(itl_s=0.12, itl_quantile=0.999),
        "batch": SloClass(),
        "gold": SloClass(itl_s=0.05, itl_quantile=0.9999, ttft_s=2.0),
    }
    assert config_of("--itl-slo", "120ms").scheduler.itl_slo_quantile == 0.99


def test_memory_utilization() -> None:
    assert config_of("--gpu-memory-utilization", "0.5").cache.gpu_memory_utilization == 0.5


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000000", 1_000_000), ("512M", 512 * 2**20), ("2g", 2**31), ("2GiB", 2**31), ("2GB", 2**31),
     ("1.5K", 1536), (" 1 T ", 2**40)],
)  # fmt: skip
def test_byte_size(text: str, size: int) -> None:
    assert byte_size(text) == size


@pytest.mark.parametrize("flag", ["--itl-slo", "--ttft-slo", "--max-wait"])
def test_a_duration_of_many_digits_is_out_of_range(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", flag, f"{'9' * 400}s"])
    assert "is not at most 86400s" in capsys.readouterr().err
    assert config_of("--speculative-slack", f"{'9' * 400}%").scheduler.speculative_slack == math.inf


@pytest.mark.parametrize("text", ["", "0", "-1", "G", "1X", "1e9", "0.1", "two"])
def test_no_byte_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        byte_size(text)


@pytest.mark.parametrize(
    "flags",
    [["--dtype", "int4"], ["--policy", "random"], ["--max-num-seqs", "many"], ["--frobnicate"],
     ["--kv-cache-memory", "1G", "--gpu-memory-utilization", "0.5"],
     ["--itl-slo", "1s:99"], ["--itl-slo", "1s:p100"], ["--slo-class", "gold:tpot=1s:p99"],
     ["--slo-class", "gold:soon"], ["--slo-class", "gold:itl=0s"], ["--slo-class", ":itl=1s"]],
)  # fmt: skip
def test_usage_errors(flags: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as raised:
        config_of(*flags)
    assert raised.value.code == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [["--max-num-seqs", "0"], ["--block-size", "0"], ["--gpu-memory-utilization", "2"]]
)
def test_values_out_of_range(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        config_of(*flags)
