"""Flags from a file."""

import argparse
from pathlib import Path

import pytest

from legato.api.config import ServerConfig
from legato.cli.flags import engine_config, server_config
from legato.cli.main import _asked_for, _parser
from legato.core.slo import SloClass
from tests.cli.test_main import legato


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "serve.yaml"


def parsed(file: Path, *flags: str) -> argparse.Namespace:
    parser = _parser(_asked_for(["serve"]))
    return parser.parse_args(["serve", "--config", str(file), *flags])


EVERYTHING = """\
# Flat, or below the headings of --help, in any spelling.
model: some/model
promises:
  itl-slo: 100ms:p99.9
  slo_class:
    - gold:ttft=1s
    - silver: {itl: 200ms, tpot: 1.5s}
KV cache: {kv-cache-memory: 512M, enable_prefix_caching: no}
tenant-weight: {a: 2, b: 0.5}
server:
  port: 0
  api-key: [one, two]
  served-model-name: [m, n]
  max-connections: null
log-level: warning
calibrate: false
"""


def test_every_kind_of_value(file: Path) -> None:
    file.write_text(EVERYTHING)
    args = parsed(file)
    engine, server = engine_config(args), server_config(args)
    assert engine.model.model == "some/model"
    assert engine.scheduler.itl_slo_s == 0.1
    assert engine.scheduler.itl_slo_quantile == 0.999
    silver = SloClass(itl_s=0.2, tpot_s=1.5)
    assert engine.scheduler.slo_classes == {"gold": SloClass(ttft_s=1.0), "silver": silver}
    assert engine.scheduler.tenant_weights == {"a": 2.0, "b": 0.5}
    assert engine.cache.kv_cache_memory_bytes == 512 * 2**20
    assert not engine.cache.enable_prefix_caching
    assert not engine.calibration.calibrate
    assert server.port == 0
    assert server.api_keys == ("one", "two")
    assert server.served_model_names == ("m", "n")
    assert server.max_connections == ServerConfig().max_connections
    assert args.log_level == "warning"


def test_the_command_line_goes_first(file: Path) -> None:
    file.write_text(EVERYTHING)
    args = parsed(
        file, "--itl_slo", "50ms", "--api-key=three", "--gpu-memory-utilization", "0.5",
        "--calibrate",
    )  # fmt: skip
    engine = engine_config(args)
    assert engine.scheduler.itl_slo_s == 0.05
    assert engine.scheduler.itl_slo_quantile == 0.99
    assert server_config(args).api_keys == ("three",)
    assert engine.cache.gpu_memory_utilization == 0.5
    assert engine.cache.kv_cache_memory_bytes is None
    assert engine.calibration.calibrate
    assert "kv_cache_memory_bytes" not in args.configured


def test_a_model_on_the_command_line_goes_first(file: Path) -> None:
    file.write_text("model: some/model")
    done = legato("serve", "no/folder/here", "--config", str(file), "--port", "0")
    assert "no model at 'no/folder/here'" in done.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("port: 0\nprot: 1", ":2: there is no flag --prot; did you mean port"),
        ("server:\n  prot: 1", ":2: there is no flag --prot; did you mean port"),
        ("servr:\n  port: 1", ":1: there is no flag --servr; did you mean server"),
        ("pipeline-parallel-size: 2", ":1: there is no flag --pipeline-parallel-size: a model is"),
        ("port: 0\nitl-slo: 100", ":2: argument --itl-slo: 100 of what?"),
        ("itl-slo: 1s\nitl_slo: 2s", ":2: --itl-slo is set on"),
        ("server: {port: 1}\nport: 2", ":2: --port is set on"),
        ("calibrate: maybe", ":1: --calibrate is true or false"),
        ("port: [[1]]", ":1: this is to be a single value"),
        ("port: {a: {b: {c: d}}}", ":1: this is to be a single value"),
        ("port: &a [*a]", ":1: this is to be a single value"),
        ("server: {server: {port: 1}}", ":1: there is no flag --server"),
        ("port: 0\npromises: 100ms", ":2: this is to be a mapping of flags to values"),
        ("config: other.yaml", ":1: there is no flag --config"),
        ("- port", ":1: this is to be a mapping"),
        ("port: [", "is not YAML"),
        ("\x00", "is not YAML"),
        (
            "port: !!python/object/apply:os.system [ls]",
            ":1: argument --port: 'ls' is not a whole number",
        ),
    ],
)
def test_what_is_wrong_with_a_file(
    file: Path, text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    with pytest.raises(SystemExit):
        parsed(file)
    err = capsys.readouterr().err
    assert told in err
    assert str(file) in err
    assert len(err.splitlines()) <= 2


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(Path("no/such.yaml"))
    assert capsys.readouterr().err.startswith("legato: no/such.yaml cannot be read")


@pytest.mark.parametrize("text", ["", "# nothing\n", "promises:\n  # itl-slo: 100ms\nserver:\n"])
def test_an_empty_file_says_nothing(file: Path, text: str) -> None:
    file.write_text(text)
    assert parsed(file).configured == frozenset()
