"""Models on transformers' layers, with Legato's attention and projections."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from legato.checkpoint.checkpoint import Checkpoint
from legato.checkpoint.loader import load_model, open_checkpoint
from legato.core.config import EngineConfig, ModelConfig
from legato.core.errors import ConfigError, UnsupportedModelError
from legato.engine.build.builder import load_runtime
from legato.model.native_attention import ReadsNativeCache
from legato.model.native_kernels import NativeKernels
from legato.model.transformers_families import FAMILIES
from legato.model.transformers_model import TransformersModel
from tests.executor.instructions import TESTED
from tests.executor.test_native import pytestmark as needs_native
from tests.families.chunked import chunked_logits
from tests.families.others import OTHERS
from tests.families.schedules import check_schedules
from tests.families.tiny import MODELS, VOCAB_SIZE, Tiny, random_model
from tests.model.conftest import assert_same_logits, reference_logits
from tests.model.dense import packed_logits
from tests.profiles import scaled

CPU = torch.device("cpu")
PROMPT = [(7 * i + 3 * i * i) % VOCAB_SIZE for i in range(90)]
ALL = {name: tiny for name, tiny in {**MODELS, **OTHERS}.items() if tiny.model_type in FAMILIES}
CHANGING = ("llama-dynamic", "phi4-mini", "hunyuan")
"""Models whose angles depend on the longest request of a step."""
IN_CI = ("gemma2", "gpt2", "stablelm", "afmoe", "granite-swa")
NAMES = [name for name in ALL if name not in CHANGING] if scaled(1) > 1 else IN_CI


def test_every_family_is_tested() -> None:
    assert set(FAMILIES) == {tiny.model_type for tiny in ALL.values()}


@pytest.mark.parametrize("name", NAMES)
def test_chunked_mixed_and_with_prefix_hits(name: str, tmp_path: Path) -> None:
    reference = random_model(ALL[name])
    reference.save_pretrained(tmp_path)
    check_schedules(reference, tmp_path, model_impl="transformers")


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(ModelConfig(model=str(folder), model_impl="transformers"))


@needs_native
@pytest.mark.parametrize(
    "name", NAMES if scaled(1) > 1 else ["llama", "gemma2", "gpt2", "granite-swa"]
)
def test_native_operators(name: str, tmp_path: Path) -> None:
    """They are as exact as transformers in bfloat16; with codes, as the codes are."""
    reference = random_model(ALL[name])
    reference.save_pretrained(tmp_path)
    exact = reference_logits(reference, PROMPT)
    usual = (reference_logits(reference.bfloat16(), PROMPT).float() - exact).abs().mean()

    def check(allowed: float, kernels: NativeKernels, codes: Any = None, **cache: bool) -> None:
        model = load_model(
            opened(tmp_path),
            dtype=torch.bfloat16,
            device=CPU,
            kernels=kernels,
            quantization=codes,
        )
        assert isinstance(model, TransformersModel)
        assert isinstance(model, ReadsNativeCache) is not model.spec.has_sinks
        error = (chunked_logits(model, PROMPT, **cache) - exact).abs().mean()
        assert float(error) <= allowed * float(usual) + 0.001 * float(exact.abs().max())

    for instructions in TESTED:
        check(1.5, NativeKernels(2, instructions))
    kernels = NativeKernels(2, TESTED[0])
    check(3.0, kernels, "int8")
    check(30.0, kernels, "int4")
    check(4.0, kernels, is_quantized=True)


@needs_native
def test_heads_of_other_sizes_attend_in_pytorch(tmp_path: Path) -> None:
    """Phi-2 has heads of 80 numbers; only its projections are native."""
    tiny = Tiny("phi", {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 2})
    reference = random_model(tiny)
    reference.save_pretrained(tmp_path)
    kernels = NativeKernels(2, TESTED[0])
    model = load_model(opened(tmp_path), dtype=torch.bfloat16, device=CPU, kernels=kernels)
    assert not isinstance(model, ReadsNativeCache)
    exact = reference_logits(reference, PROMPT)
    error = (chunked_logits(model, PROMPT) - exact).abs()
    assert float(error.mean()) <= 0.01 * float(exact.abs().max())


def hub_gpt2(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """GPT-2 on the hub: no prefix, and buffers of the mask."""
    names = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    return names | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}


def test_gpt2_as_it_is_on_the_hub(tmp_path: Path) -> None:
    reference = random_model(OTHERS["gpt2"])
    reference.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(hub_gpt2(load_file(path)), path)
    model = load_model(opened(tmp_path), dtype=torch.float32, device=CPU)
    (logits,) = packed_logits(model, [PROMPT])
    assert_same_logits(logits, reference_logits(reference, PROMPT))


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    random_model(OTHERS["stablelm"]).config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    contents = json.loads(path.read_text()) | {"architectures": ["StableLmForCausalLM"]}
    path.write_text(json.dumps(contents))
    checkpoint = open_checkpoint(ModelConfig(model=str(tmp_path), load_format="dummy"))
    model = load_model(checkpoint, dtype=torch.float32, device=CPU)
    assert isinstance(model, TransformersModel)
    (logits,) = packed_logits(model, [PROMPT])
    assert bool(logits.isfinite().all())


def written(folder: Path, contents: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(contents))
    return folder


def config_of(name: str) -> dict[str, Any]:
    tiny = ALL[name]
    contents: dict[str, Any] = json.loads(tiny.config().to_json_string())
    return contents | {"architectures": [FAMILIES[tiny.model_type]]}


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": (
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
        "MambaForCausalLM: its layers carry a recurrent state",
    ),
    "rwkv": (
        {"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"},
        "RwkvForCausalLM: its layers carry a recurrent state",
    ),
    "bloom": (
        {"architectures": ["BloomForCausalLM"], "model_type": "bloom"},
        "adds biases by distance",
    ),
    "code": (
        {
            "architectures": ["OwnForCausalLM"],
            "model_type": "own",
            "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
        },
        r"OwnForCausalLM: its layers are code of the checkpoint \(auto_map\), which Legato never",
    ),
    "unknown": (
        {"architectures": ["OwnForCausalLM"], "model_type": "own"},
        "the model type own is on no list",
    ),
    "another head": (
        {"architectures": ["GPT2ForSequenceClassification"], "model_type": "gpt2"},
        "of the model type gpt2, Legato runs GPT2LMHeadModel",
    ),
    "changing rope": (
        config_of("stablelm")
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope type dynamic on transformers' layers is not supported",
    ),
    "layers": (config_of("stablelm") | {"num_hidden_layers": 10**9}, "the number of layers is"),
    "quantized": (
        config_of("stablelm") | {"quantization_config": {"quant_method": "quip"}},
        "quantized.*'quip'",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_reason_before_weights_are_read(name: str, tmp_path: Path) -> None:
    contents, message = REFUSALS[name]
    with pytest.raises(UnsupportedModelError, match=message) as refusal:
        open_checkpoint(ModelConfig(model=str(written(tmp_path, contents))))
    assert "\n" not in str(refusal.value)


def test_both_ways_is_refused(tmp_path: Path) -> None:
    contents = config_of("gemma3") | {"use_bidirectional_attention": True}
    with pytest.raises(UnsupportedModelError, match="attention to later tokens"):
        opened(written(tmp_path, contents))


def test_legato_layers_can_be_demanded(tmp_path: Path) -> None:
    folder = written(tmp_path, config_of("stablelm"))
    with pytest.raises(UnsupportedModelError, match="unsupported architecture StableLmForCausalLM"):
        open_checkpoint(ModelConfig(model=str(folder), model_impl="legato"))


def test_gguf_files_are_for_legato_layers() -> None:
    with pytest.raises(ConfigError, match="GGUF"):
        open_checkpoint(ModelConfig(model_impl="transformers"))


def test_a_gpu_and_bench_kernels_want_legato_layers(tmp_path: Path) -> None:
    folder = written(tmp_path, config_of("stablelm"))
    checkpoint = open_checkpoint(ModelConfig(model=str(folder), load_format="dummy"))
    with pytest.raises(ConfigError, match="for Legato's own layers alone"):
        _ = checkpoint.decoder_spec


def test_ranks_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, config_of("stablelm"))
    settings = {"model": str(folder), "load_format": "dummy", "tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match="transformers' layers are not divided among ranks"):
        load_runtime(EngineConfig.of(**settings))
