"""Flags and the settings they make."""

import argparse
from typing import Any

import pytest

from legato.cli.flags import add_engine_flags, byte_size, engine_config
from legato.core.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from legato.core.errors import ConfigError


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
        "--max-waiting", "0", "--policy", "prefill-first", "--no-enable-chunked-prefill",
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
            enable_chunked_prefill=False,
            max_waiting=0,
        ),
    )


def test_memory_utilization() -> None:
    assert config_of("--gpu-memory-utilization", "0.5").cache.memory_utilization == 0.5


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000000", 1_000_000), ("512M", 512 * 2**20), ("2g", 2**31), ("2GiB", 2**31), ("2GB", 2**31),
     ("1.5K", 1536), (" 1 T ", 2**40)],
)  # fmt: skip
def test_byte_size(text: str, size: int) -> None:
    assert byte_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "G", "1X", "1e9", "0.1", "two"])
def test_no_byte_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        byte_size(text)


@pytest.mark.parametrize(
    "flags",
    [["--dtype", "int4"], ["--policy", "random"], ["--max-num-seqs", "many"], ["--frobnicate"],
     ["--kv-cache-memory", "1G", "--gpu-memory-utilization", "0.5"]],
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
    with pytest.raises(ConfigError):
        config_of(*flags)
