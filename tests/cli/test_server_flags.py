"""The server's flags and the settings they make."""

import argparse
from pathlib import Path

import pytest

from legato.api.config import ServerConfig
from legato.cli.flags import add_server_flags, server_config
from legato.core.errors import ConfigError


def config_of(*flags: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    add_server_flags(parser)
    return server_config(parser.parse_args(flags))


def test_no_flags_are_the_defaults() -> None:
    assert config_of() == ServerConfig()


def test_every_flag_reaches_its_field() -> None:
    config = config_of(
        "--host", "::1", "--port", "0", "--api-key", "a,b", "--api-key", "c",
        "--admin-api-key", "d", "--admin-api-key", "e,f",
        "--share-cache-between-tenants",
        "--served-model-name", "m", "n", "--allowed-origins", "https://a.example,http://b:8000",
        "--allowed-host", "a.example,.b.example", "--allowed-host", "*",
        "--trust-request-chat-template", "--message-special-tokens", "refuse",
        "--unknown-fields", "ignore", "--ollama-version", "0.9.1",
        "--llama-timings",
        "--default-max-tokens", "64", "--max-output-tokens", "128",
        "--max-body-size", "1M", "--max-header-size", "4K",
        "--reasoning-budget", "-1", "--max-reasoning-budget", "900",
        "--reasoning-budget-message", "Now.",
        "--max-completions", "8", "--max-unread-tokens", "100", "--max-connections", "20",
        "--timeout-keep-alive", "2m", "--timeout-header", "1500ms", "--timeout-body", "3s",
        "--timeout-write", "4s", "--timeout-prompt", "5s", "--timeout-engine", "1m",
        "--timeout-drain", "30s", "--metrics-prefix", "vllm", "--enable-tokenizer-info-endpoint",
        "--max-stored-responses", "5", "--max-stored-size", "3M",
        "--kv-events-endpoint", "tcp://127.0.0.1:5557",
        "--kv-events-replay-endpoint", "ipc:///run/kv", "--kv-events-topic", "kv",
        "--trace", "t.jsonl.gz",
        "--max-trace-size", "2M", "--otlp-traces-endpoint", "http://localhost:4318/v1/traces",
    )  # fmt: skip
    assert config == ServerConfig(
        host="::1",
        port=0,
        api_keys=("a", "b", "c"),
        admin_api_keys=("d", "e", "f"),
        share_cache_between_tenants=True,
        served_model_names=("m", "n"),
        allowed_origins=("https://a.example", "http://b:8000"),
        allowed_hosts=("a.example", ".b.example", "*"),
        trust_request_chat_template=True,
        message_special_tokens="refuse",
        unknown_fields="ignore",
        max_body_bytes=2**20,
        max_header_bytes=4096,
        ollama_version="0.9.1",
        llama_timings=True,
        default_max_tokens=64,
        max_output_tokens=128,
        reasoning_budget=-1,
        reasoning_budget_message="Now.",
        max_reasoning_budget=900,
        max_completions=8,
        max_unread_tokens=100,
        max_connections=20,
        timeout_keep_alive_s=120.0,
        timeout_header_s=1.5,
        timeout_body_s=3.0,
        timeout_write_s=4.0,
        timeout_prompt_s=5.0,
        timeout_engine_s=60.0,
        timeout_drain_s=30.0,
        metrics_prefix="vllm",
        enable_tokenizer_info_endpoint=True,
        max_stored_responses=5,
        max_stored_bytes=3 * 2**20,
        kv_events_endpoint="tcp://127.0.0.1:5557",
        kv_events_replay_endpoint="ipc:///run/kv",
        kv_events_topic="kv",
        trace="t.jsonl.gz",
        max_trace_bytes=2**21,
        otlp_traces_endpoint="http://localhost:4318/v1/traces",
    )
    defaults = ServerConfig()
    assert all(
        getattr(config, name) != getattr(defaults, name) for name in config.__struct_fields__
    )


def test_keys_from_a_file_are_added(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("b\n\nc\n")
    assert config_of("--api-key-file", str(file)).api_keys == ("b", "c")
    assert config_of("--api-key", "a", "--api-key-file", str(file)).api_keys == ("a", "b", "c")
    admins = config_of("--api-key", "a", "--admin-api-key-file", str(file))
    assert (admins.api_keys, admins.admin_api_keys) == (("a",), ("b", "c"))


@pytest.mark.parametrize("content", [None, b" \n", b"\xff"])
def test_a_file_without_keys_opens_nothing(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit):
        config_of("--api-key-file", str(file))
    assert "api-key-file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag", ["--api-key", "--admin-api-key", "--allowed-origins", "--allowed-host"]
)
def test_an_empty_list_opens_nothing(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_of(flag, ",")
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--port", "65536"],
        ["--trace", "trace.txt"],
        ["--kv-events-endpoint", "tcp://*:5557"],
        ["--kv-events-endpoint", "tcp://10.0.0.5:5557"],
        ["--kv-events-endpoint", "5557"],
        ["--kv-events-topic", "kv"],
        ["--kv-events-replay-endpoint", "tcp://127.0.0.1:5557"],
        ["--otlp-traces-endpoint", "localhost:4317"],
        ["--allowed-origins", "example.com"],
        ["--allowed-origins", "https://example.com/"],
        ["--allowed-origins", '["*"]'],
        ["--allowed-host", "https://example.com"],
        ["--allowed-host", "example.com:8000"],
        ["--allowed-host", "*.example.com"],
        ["--max-connections", "0"],
        ["--max-unread-tokens", "0"],
        ["--max-completions", "0"],
        ["--timeout-write", "0s"],
        ["--served-model-name", "a\udcff"],
        ["--api-key", "a\udcff"],
    ],
)
def test_values_out_of_range(flags: list[str]) -> None:
    with pytest.raises((SystemExit, ConfigError)):
        config_of(*flags)
