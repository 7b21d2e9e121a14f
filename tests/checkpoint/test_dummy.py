"""Random weights of a description alone."""

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from legato import LLM, SamplingParams
from legato.checkpoint.loader import load_model, open_checkpoint, resolve_dtype
from legato.checkpoint.source import configured_source
from legato.core.config import ModelConfig, Quantization
from legato.core.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from legato.language.tokenizer.loading import load_text, text_source
from legato.model.decoder import Decoder
from tests.model.conftest import TINY, SaveTiny

from .test_damage import UP, plant
from .test_gguf import write_gguf

CPU = torch.device("cpu")


def described(folder: Path, config: PreTrainedConfig, **changes: object) -> Path:
    """A folder of nothing but a config.json."""
    folder.mkdir(exist_ok=True)
    contents = config.to_dict() | {"architectures": [f"{type(config).__name__[:-6]}ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(contents | changes))
    return folder


def slots(path: Path, **settings: object) -> dict[str, torch.Tensor]:
    config = ModelConfig(model=str(path), load_format="dummy", **settings)  # type: ignore[arg-type]
    checkpoint = open_checkpoint(config)
    model = load_model(
        checkpoint,
        dtype=resolve_dtype(config, checkpoint),
        device=CPU,
        quantization=config.quantization,
    )
    assert isinstance(model, Decoder)
    return model.checkpoint_slots()


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_every_weight_of_a_description_is_made(
    tmp_path: Path, config: type[PreTrainedConfig]
) -> None:
    folder = described(tmp_path, config(**TINY), dtype="float32")
    made, again = slots(folder), slots(folder)
    assert all(torch.equal(made[name], again[name]) for name in made)
    matrices = {name: slot for name, slot in made.items() if slot.dim() == 2}
    for name, matrix in matrices.items():
        assert matrix.dtype is torch.float32
        rows = torch.randn(64, matrix.shape[1], generator=torch.Generator().manual_seed(0))
        assert 0.7 < float((rows @ matrix.T).std()) < 1.4, name
    for shape in {matrix.shape for matrix in matrices.values()}:
        alike = [matrix for matrix in matrices.values() if matrix.shape == shape]
        assert len({float(matrix[0, 0]) for matrix in alike}) == len(alike)
    assert all(bool((slot == 1).all()) for name, slot in made.items() if "norm" in name)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_they_are_quantized_as_others_are(tmp_path: Path, quantization: Quantization) -> None:
    folder = described(tmp_path, LlamaConfig(**TINY), dtype="float32")
    plain, rounded = slots(folder), slots(folder, quantization=quantization)
    error = (rounded[UP] - plain[UP]).norm() / plain[UP].norm()
    assert 0.001 < float(error) < 0.1


def test_weights_that_are_there_are_not_read(save_tiny: SaveTiny) -> None:
    folder, _ = save_tiny(LlamaConfig(**TINY))
    plant(folder, UP, (0, 0), float("nan"))
    checkpoint = open_checkpoint(ModelConfig(model=str(folder)))
    with pytest.raises(UnsupportedModelError, match="damaged"):
        load_model(checkpoint, dtype=torch.float32, device=CPU)
    assert bool(slots(folder)[UP].isfinite().all())


def test_of_a_gguf_file_the_shape_is_taken(save_tiny: SaveTiny) -> None:
    folder, model = save_tiny(LlamaConfig(**TINY))
    path = folder / "tiny.gguf"
    write_gguf(path, "llama", model)
    dummy = slots(path, dtype="float32")
    assert not torch.equal(dummy[UP], model.state_dict()[UP])
    with pytest.raises(ConfigError, match="keeps a file's weights"):
        slots(path, quantization="gguf")


def test_no_weights_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(_: str, *, allow_patterns: list[str], **__: object) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda *_, **__: [])
    configured_source(ModelConfig(model="org/name", load_format="dummy"))
    assert asked == ["*.json", "*.jinja", "tokenizer.model"]
    configured_source(ModelConfig(model="org/name"))
    assert "*.safetensors" in asked


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_they_generate_without_a_tokenizer(tmp_path: Path, kernels: str) -> None:
    folder = described(tmp_path, LlamaConfig(**TINY))
    llm = LLM(str(folder), load_format="dummy", kernels=kernels, kv_cache_memory_bytes=2**22)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": [1, 2, 3 + i]} for i in range(3)]
    answers = llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    assert {len(answer.outputs[0].token_ids) for answer in answers} == {8}
    assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) > 1
    with pytest.raises(InvalidRequestError, match="for want of one"):
        llm.generate("text", params, use_tqdm=False)


def test_a_server_reads_texts_and_wants_a_tokenizer(tmp_path: Path) -> None:
    config = ModelConfig(model=str(described(tmp_path, LlamaConfig(**TINY))), load_format="dummy")
    with pytest.raises(UnsupportedModelError, match="name another's by --tokenizer"):
        load_text(text_source(config, configured_source(config)))


def test_a_quantized_description_is_refused(tmp_path: Path) -> None:
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    path = described(tmp_path / "awq", LlamaConfig(**TINY), quantization_config=quantization)
    with pytest.raises(UnsupportedModelError, match="is quantized, and dummy weights are not"):
        slots(path)
