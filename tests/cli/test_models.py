"""`legato models`."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from benchmarks.formats.hub_copy import save_quantized
from benchmarks.formats.hub_writers import FORMATS
from huggingface_hub.utils import SafetensorsFileMetadata, SafetensorsRepoMetadata, TensorInfo
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

from legato.checkpoint.loader import load_model, open_checkpoint
from legato.cli.main import main
from legato.core.config import DEFAULT_MODEL, EngineConfig, ModelConfig
from legato.engine.build import dry_run, model_report
from legato.engine.build.blueprint import Blueprint
from legato.engine.build.cpu import cpu_runtime
from legato.engine.build.runtime import ModelRuntime
from legato.model.architectures import ARCHITECTURES
from legato.model.native_kernels import native_instructions
from legato.model.states import make_states
from tests.families.tiny import MODELS, random_model
from tests.model.conftest import TINY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    random_model(MODELS["qwen3"]).save_pretrained(path)
    return path


def _json(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> dict[str, Any]:
    assert main(["models", *args, "--json", "--no-probe"]) == status
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_lists_every_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in ARCHITECTURES)
    assert main(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["architecture"] for row in rows] == [*ARCHITECTURES]
    (apertus,) = (row for row in rows if row["model_type"] == "apertus")
    assert "xielu" in apertus["native"]
    assert "xielu" in apertus["gpu"]


def test_describes_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = _json(capsys, str(folder))
    weights = load_file(folder / "model.safetensors")
    assert report["architecture"] == "Qwen3ForCausalLM"
    assert report["num_parameters"] == sum(tensor.numel() for tensor in weights.values())
    assert report["num_layers"] == 4
    assert report["max_model_len"] == 512
    assert report["returns"] == ["text", "embeddings"]
    assert report["cpu_layers"] == "PyTorch"
    assert "float32" in str(report["why_not_native"])
    # 4 layers of 2 heads of 64, keys and values, in 4 bytes
    assert report["cache_token_bytes"] == 4 * 2 * 64 * 2 * 4
    assert report["cache_bytes"] == 4 * 2 * 64 * 2 * 4 * 512
    assert report["num_active_parameters"] == report["num_parameters"]
    assert report["state_bytes"] == 0
    checkpoint = open_checkpoint(ModelConfig(model=str(folder)))
    model = load_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(model, torch.nn.Module)
    assert report["weight_bytes"] == sum(p.nbytes for p in model.parameters())


def test_lists_what_becomes_of_the_keys(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    contents = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(contents | {"alibi": True}))
    keys = _json(capsys, str(tmp_path))["keys"]
    assert keys["unread"] == ["alibi"]
    assert "hidden_size" in keys["used"]
    assert "rope_scaling" not in keys["defaulted"]  # the file has its other spelling
    assert keys["without_effect"]["use_cache"].startswith("it is about")
    assert main(["models", str(tmp_path), "--no-probe"]) == 0
    shown = capsys.readouterr().out
    assert "keys that nothing reads   alibi\n" in shown


def test_layers_with_a_window_keep_what_it_reaches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = random_model(MODELS["gemma2"]).config
    random_model(MODELS["gemma2"]).save_pretrained(tmp_path)
    report = _json(capsys, str(tmp_path))
    reach = [
        config.sliding_window if kind == "sliding_attention" else report["max_model_len"]
        for kind in config.layer_types
    ]
    assert len({*reach}) == 2
    layer_bytes = report["cache_token_bytes"] // len(reach)
    assert report["cache_bytes"] == layer_bytes * sum(reach)


def test_states_and_experts_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_model(MODELS["nemotron-3"]).save_pretrained(tmp_path)
    report = _json(capsys, str(tmp_path))
    spec = open_checkpoint(ModelConfig(model=str(tmp_path))).decoder_spec
    slots = make_states(spec.states, 2, torch.float32, torch.device("cpu"))
    assert report["state_bytes"] == sum(part.nbytes for layer in slots for part in layer)
    # 3 of 6 experts compute a token.
    weights = load_file(tmp_path / "model.safetensors")
    experts = sum(tensor.numel() for name, tensor in weights.items() if ".experts." in name)
    assert report["num_active_parameters"] == report["num_parameters"] - experts // 2
    # One layer of 2 heads of 32, keys and values, in 4 bytes
    assert report["cache_token_bytes"] == 2 * 32 * 2 * 4
    assert main(["models", str(tmp_path), "--no-probe"]) == 0
    shown = capsys.readouterr().out
    assert f"a token takes {report['num_active_parameters']:,}" in shown
    assert "states of a request" in shown


def test_describes_a_classifier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = MODELS["llama"].config()
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    assert _json(capsys, str(tmp_path))["returns"] == ["embeddings", "scores"]


def test_a_tied_embedding_of_native_layers_is_there_twice(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    once = _json(capsys, str(folder))
    monkeypatch.setattr(model_report.native, "why_not_native", lambda *_: "")
    twice = _json(capsys, str(folder))
    assert twice["cpu_layers"] == "native"
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert twice["weight_bytes"] == once["weight_bytes"] + embedding.nbytes


def test_describes_the_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    report = _json(capsys, DEFAULT_MODEL)
    assert report["num_parameters"] == 134_515_008
    assert report["num_layers"] == 30
    assert "Q4_1" in str(report["quantization"])
    assert report["cache_token_bytes"] == 30 * 3 * 64 * 2 * 2
    assert report["weight_bytes"] < report["widened_weight_bytes"]
    assert main(["models", DEFAULT_MODEL, "--no-probe"]) == 0
    shown = capsys.readouterr().out
    assert "134,515,008" in shown
    assert "22.5 KiB" in shown


def test_reads_no_weights(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def headers(path: Path, **_: object) -> SimpleNamespace:
        file = safe_open(path, framework="pt")
        return SimpleNamespace(keys=file.keys, get_slice=file.get_slice)

    monkeypatch.setattr("legato.checkpoint.weight_files.safe_open", headers)
    assert _json(capsys, str(folder))["num_layers"] == 4


def test_a_refused_model_has_one_line_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    assert main(["models", str(tmp_path), "--no-probe"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("legato: unsupported architecture MambaForCausalLM")
    assert shown.err.count("\n") == 1
    assert "MambaForCausalLM" in str(_json(capsys, str(tmp_path), status=1)["refused"])


def test_wrong_shapes_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, tmp_path / "model.safetensors")
    assert main(["models", str(tmp_path), "--no-probe"]) == 1
    assert "model.norm.weight has shape (3,)" in capsys.readouterr().err


def test_a_missing_model_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "/no/such/model"]) == 2
    assert "there is no model at" in capsys.readouterr().err


def test_a_hub_model_is_described_by_its_headers(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def download(_repo: str, *, allow_patterns: list[str], **_: object) -> str:
        asked.append(allow_patterns)
        return str(folder)

    tensors = {
        name: TensorInfo("BF16", list(tensor.shape), (0, 0))
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    file = SafetensorsFileMetadata({}, tensors)
    headers = SafetensorsRepoMetadata(None, False, {}, {"model.safetensors": file})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda *_, **__: headers)
    local = _json(capsys, str(folder))
    remote = _json(capsys, "someone/tiny-qwen3")
    assert not any("safetensors" in pattern for patterns in asked for pattern in patterns)
    assert {**remote, "model": local["model"]} == local


def test_a_probe_says_what_would_happen_here(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "_PROBE_S", 0.0)
    assert main(["models", str(folder), "--json"]) == 0
    here = json.loads(capsys.readouterr().out)["here"]
    assert (here["kernels"], here["dtype"], here["max_model_len"]) == ("torch", "float32", 512)
    assert here["cache_bytes"] == here["cache_tokens"] * 4 * 2 * 64 * 2 * 4
    assert here["speed"]["num_layers"] == 4
    assert here["speed"]["token_s"] > 0 < here["speed"]["prompt_tokens_s"]
    assert here["refusals"] == []
    assert "--max-num-seqs 64" in here["command"]
    assert "--itl-slo" not in here["command"], "auto, as a server's"


@pytest.mark.parametrize("kind", ["qwen3", "nemotron-3"])
def test_a_probe_of_a_large_model_loads_its_first_layers_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model(MODELS[kind]).save_pretrained(tmp_path)
    monkeypatch.setattr(dry_run, "_PROBE_S", 0.0)
    monkeypatch.setattr(dry_run, "_PROBED_BYTES", 1)
    loaded: list[int] = []

    def noting(blueprint: Blueprint) -> ModelRuntime:
        loaded.append(blueprint.checkpoint.spec.num_layers)
        return cpu_runtime(blueprint)

    monkeypatch.setattr(dry_run, "cpu_runtime", noting)
    run = dry_run.dry_run(EngineConfig.of(model=str(tmp_path)))
    whole = open_checkpoint(ModelConfig(model=str(tmp_path))).decoder_spec
    assert run.speed is not None, run.unmeasured
    assert loaded == [run.speed.num_layers]
    assert loaded[0] < whole.num_layers
    part = dry_run.first_layers(open_checkpoint(ModelConfig(model=str(tmp_path))), loaded[0])
    assert bool(part.decoder_spec.states) == bool(whole.states)


def test_quantized_weights_are_counted_without_those_of_images(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    save_quantized(LlamaForCausalLM(LlamaConfig(**TINY | sizes)), tmp_path, FORMATS["GPTQ"])
    described, path = tmp_path / "config.json", tmp_path / "model.safetensors"
    config = json.loads(described.read_text())
    outer = {"quantization_config": config.pop("quantization_config")}
    outer |= {"architectures": ["LlavaForConditionalGeneration"], "text_config": config}
    described.write_text(json.dumps(outer))
    alone = model_report.report_model(ModelConfig(model=str(tmp_path)))
    save_file({**load_file(path), "vision_tower.weight": torch.zeros(512, 512)}, path)
    beside = model_report.report_model(ModelConfig(model=str(tmp_path)))
    assert beside.weight_bytes == alone.weight_bytes


def test_a_dry_run_counts_weights_as_layers_hold_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's layers widen codes; weights that are rounded here have a plain embedding."""
    monkeypatch.setattr(dry_run, "_probe", lambda _: None)

    def num_bytes(**model: Any) -> int:
        return dry_run.dry_run(EngineConfig.of(max_model_len=64, **model)).weight_bytes

    report = model_report.report_model(ModelConfig())
    assert num_bytes(kernels="torch") == num_bytes(kernels="torch", quantization="gguf")
    assert num_bytes(kernels="torch") == report.widened_weight_bytes
    assert num_bytes(dtype="float32") >= 4 * report.num_parameters
    if native_instructions():
        assert num_bytes() == report.weight_bytes < num_bytes(quantization="none")
        codes = 34 / 32 * report.num_parameters
        assert num_bytes(quantization="int8") == int(codes) + 2 * 49_152 * 576


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (("--quantization", "fp8"), "quantization fp8 is for GPUs"),
        (("--quantization", "w8a8", "--kernels", "torch"), "w8a8 needs native kernels"),
        (("--speculative-model", "/nonexistent"), "there is no model at '/nonexistent'"),
        (("--tensor-parallel-size", "7"), "cannot be divided among 7 ranks"),
    ],
)
def test_a_dry_run_refuses_once_what_a_start_refuses(
    flags: tuple[str, ...], refusal: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(folder), "--dry-run", "--port", "0", *flags]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert refusal in shown.partition("refused 1 ")[2]
    assert "refused 2" not in shown


def test_a_dry_run_says_all_that_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "free_memory_bytes", lambda: 4096)
    flags = ("--dry-run", "--port", "0", "--kernels", "avx2", "--kv-cache-memory", "1K")
    assert main(["serve", str(folder), *flags]) == 1
    shown = capsys.readouterr().out
    assert "refused 1  the avx2 kernels cannot run here: " in shown.replace("    ", "")
    assert "0.00 GiB are free: --quantization makes them smaller" in shown
    assert "raise --kv-cache-memory or lower --max-model-len" in shown
    assert "time of a token" not in shown


def test_a_dry_run_looks_at_the_address(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(folder), "--dry-run", "--port", port]) == 2
    assert "Address already in use" in capsys.readouterr().err
