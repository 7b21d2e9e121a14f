"""Files as published tools write them, where a key and the tensors disagree or are elsewhere."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.formats.hub_copy import save_quantized
from benchmarks.formats.hub_writers import FORMATS, HubFormat, _gptq, _nvfp4
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from legato.checkpoint.defaults import load_defaults
from legato.checkpoint.float_schemes import Float8Experts
from legato.checkpoint.loader import load_model, open_checkpoint
from legato.checkpoint.scheme import Header
from legato.checkpoint.source import ModelSource
from legato.checkpoint.weight_files import WeightFiles
from legato.core.config import ModelConfig
from legato.core.errors import UnsupportedModelError
from legato.model.mlp_spec import MoeSpec
from legato.model.quantization import QuantizedWeight, plain, quantize
from legato.model.transforms import shapes_after, split_experts
from tests.model.conftest import assert_same_logits, reference_logits
from tests.model.dense import packed_logits

Tensors = dict[str, torch.Tensor]
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
PROMPT = [(11 * i + 5 * i * i) % 64 for i in range(20)]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PROJ = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)
    return model


@pytest.fixture
def folder(model: LlamaForCausalLM, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path)
    return tmp_path


def change(
    folder: Path,
    config: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    tensors: Callable[[Tensors], Tensors] = dict,
) -> None:
    path, weights = folder / "config.json", folder / "model.safetensors"
    path.write_text(json.dumps(config(json.loads(path.read_text()))))
    save_file(tensors(load_file(weights)), weights)


def logits(folder: Path) -> torch.Tensor:
    checkpoint = open_checkpoint(ModelConfig(model=str(folder)))
    model = load_model(checkpoint, dtype=torch.float32, device=torch.device("cpu"))
    return packed_logits(model, [PROMPT])[0]


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def test_an_own_head_wins_over_the_key(
    folder: Path, model: LlamaForCausalLM, caplog: pytest.LogCaptureFixture
) -> None:
    change(folder, lambda config: config | {"tie_word_embeddings": True})
    assert_same_logits(logits(folder), reference_logits(model, PROMPT))
    assert f"{HEAD} has a value of its own" in caplog.text


@pytest.mark.parametrize("has_own_head", [True, False])
def test_matrices_are_compared_up_to_the_first_rows_that_differ(
    folder: Path, has_own_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows = SHAPE["vocab_size"]
    if not has_own_head:
        change(folder, tensors=lambda own: own | {HEAD: own[EMBEDDING].clone()})
    read: list[int] = []

    def rows(count: int) -> Iterator[slice]:
        for row in range(count):
            read.append(row)
            yield slice(row, row + 1)

    monkeypatch.setattr("legato.checkpoint.weight_files.few_rows", rows)
    files = WeightFiles(folder, ())
    shape = num_rows, SHAPE["hidden_size"]
    assert files.has_copies((EMBEDDING, HEAD), shape, dict) is not has_own_head
    assert read == ([0] if has_own_head else list(range(num_rows)))


@pytest.mark.parametrize("kept", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)])
@pytest.mark.parametrize("is_said", [True, False])
def test_tied_matrices_are_read_from_either(
    folder: Path, model: LlamaForCausalLM, kept: tuple[str, ...], is_said: bool
) -> None:
    def tied(tensors: Tensors) -> Tensors:
        own = {name: tensors[EMBEDDING].clone() for name in kept}
        return without(tensors, EMBEDDING, HEAD) | own

    if not is_said and EMBEDDING not in kept:
        return  # without a key, a head alone is no embedding matrix
    change(
        folder,
        lambda config: (
            without(config, "tie_word_embeddings")
            | ({"tie_word_embeddings": True} if is_said else {})
        ),
        tied,
    )
    reference = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).eval()
    reference.load_state_dict(without(model.state_dict(), HEAD), strict=False)
    assert_same_logits(logits(folder), reference_logits(reference, PROMPT))
    spec = open_checkpoint(ModelConfig(model=str(folder))).decoder_spec
    assert spec.tie_word_embeddings or HEAD in kept


def test_a_key_that_denies_the_tie_needs_a_head(folder: Path) -> None:
    change(
        folder,
        lambda config: config | {"tie_word_embeddings": False},
        lambda tensors: without(tensors, HEAD),
    )
    with pytest.raises(UnsupportedModelError, match=f"lacks {HEAD}"):
        logits(folder)


def test_a_stale_index_is_passed_over(folder: Path, model: LlamaForCausalLM) -> None:
    stale = {"weight_map": {HEAD: "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(stale))
    assert_same_logits(logits(folder), reference_logits(model, PROMPT))


@pytest.mark.parametrize(
    "name",
    [
        *(f"{PROJ}.k_scale", f"{PROJ}.kv_scale", f"{PROJ}.k_proj.k_scale"),
        *(f"{PROJ}.v_proj.output_scale", f"{PROJ}.attn.v_scale"),
    ],
)
def test_scales_of_a_cache_are_passed_over(
    folder: Path, model: LlamaForCausalLM, name: str
) -> None:
    change(folder, tensors=lambda tensors: tensors | {name: torch.tensor(0.5)})
    assert_same_logits(logits(folder), reference_logits(model, PROMPT))


def renamed(old: str, new: str, **more: torch.Tensor) -> Callable[[Tensors], Tensors]:
    def apply(tensors: Tensors) -> Tensors:
        found = {name.replace(old, new): tensor for name, tensor in tensors.items()}
        added = {
            name.replace("weight", suffix): tensor.clone()
            for name in found
            for suffix, tensor in more.items()
            if name.endswith("_proj.weight")
        }
        return found | added

    return apply


def in_a_file_of_its_own(folder: Path) -> None:
    path = folder / "config.json"
    contents = json.loads(path.read_text())
    own = contents.pop("quantization_config") | {"kv_cache_quant_algo": None}
    path.write_text(json.dumps(contents))
    apart = {"producer": {"name": "modelopt"}, "quantization": without(own, "quant_method")}
    (folder / "hf_quant_config.json").write_text(json.dumps(apart))


FILES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "ministral 3": (
        "FP8 tensor",
        lambda folder: change(
            folder,
            lambda config: (
                config
                | {
                    "quantization_config": {
                        "quant_method": "fp8",
                        "activation_scheme": "static",
                        "weight_block_size": None,
                    }
                }
            ),
            renamed("weight_scale", "weight_scale_inv", activation_scale=torch.tensor(0.1)),
        ),
    ),
    "Meta's Llama 3.1 405B": (
        "FP8 channel",
        lambda folder: change(
            folder,
            lambda config: (
                config
                | {
                    "quantization_config": {
                        "quant_method": "fbgemm_fp8",
                        "activation_scale_ub": 1200.0,
                        "modules_to_not_convert": ["lm_head"],
                    }
                }
            ),
        ),
    ),
    "hf_quant_config.json": ("NVFP4 ModelOpt", in_a_file_of_its_own),
    "frozen": (
        "FP8 channel",
        lambda folder: change(
            folder,
            lambda config: (
                config
                | {
                    "quantization_config": config["quantization_config"]
                    | {"quantization_status": "frozen", "sparsity_config": {"format": "dense"}}
                }
            ),
        ),
    ),
    "in text_config": (
        "GPTQ",
        lambda folder: change(
            folder,
            lambda config: {
                "architectures": ["Mistral3ForConditionalGeneration"],
                "model_type": "mistral3",
                "text_config": without(config, "architectures"),
            },
        ),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_quantized_files(name: str, model: LlamaForCausalLM, tmp_path: Path) -> None:
    form, edit = FILES[name]
    values = save_quantized(model, tmp_path, FORMATS[form])
    edit(tmp_path)
    check_values(tmp_path, values, 7)


def check_values(folder: Path, values: Tensors, num_quantized: int) -> None:
    tensors = dict(open_checkpoint(ModelConfig(model=str(folder))).tensors(torch.device("cpu")))
    found = {name: own for name, own in tensors.items() if isinstance(own, QuantizedWeight)}
    assert len(found) == num_quantized
    for name, own in found.items():
        assert torch.allclose(own.dequantize(), values[name], rtol=1e-5, atol=1e-6), name


def mixed(first: HubFormat, second: HubFormat, config: dict[str, Any]) -> HubFormat:
    """Matrices of the two formats in turns."""
    count = iter(range(100))
    return HubFormat(config, lambda weight: (first if next(count) % 2 else second).write(weight))


MIXED = {
    "GPTQ's dynamic": mixed(
        FORMATS["GPTQ"],
        HubFormat({}, _gptq(1, bits=8)),
        FORMATS["GPTQ"].config | {"dynamic": {r"+:.*(q|v)_proj": {"bits": 8}}},
    ),
    "ModelOpt": mixed(
        HubFormat({}, _nvfp4("weight", "weight_scale_2", divides=False)),
        FORMATS["FP8 tensor"],
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
    ),
    "compressed-tensors": mixed(
        FORMATS["NVFP4"],
        FORMATS["FP8 channel"],
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                str(i): form.config["config_groups"]["group_0"] | {"format": form.config["format"]}
                for i, form in enumerate((FORMATS["NVFP4"], FORMATS["FP8 channel"]))
            },
        },
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_modules_of_two_formats(name: str, model: LlamaForCausalLM, tmp_path: Path) -> None:
    check_values(tmp_path, save_quantized(model, tmp_path, MIXED[name]), 7)


@pytest.mark.parametrize("block", [None, (2, 4)])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_stacked_experts_in_fp8(block: tuple[int, int] | None, num_rows: int) -> None:
    """Mistral Small 4: the experts' matrices in one tensor; a scale each, or for gates and ups."""
    if block is not None and num_rows == 1:
        return
    weight = torch.randn(3, 4, 8).to(torch.float8_e4m3fn)
    scales = torch.rand(3, num_rows, 1 if block is None else 2) + 0.5
    scheme = Float8Experts(block)
    headers = {
        "": Header("F8_E4M3", (3, 4, 8)),
        "_scale_inv": Header("F32", tuple(scales.shape)),
    }
    assert scheme.of(headers) is scheme
    assert scheme.size(headers, lambda _: weight) == (12, 8)
    wide = scales.repeat_interleave(4 // num_rows, dim=1)
    wide = wide.repeat_interleave(8 // scales.shape[2], dim=2)
    own = scheme.read({"": weight, "_scale_inv": scales})
    assert torch.allclose(own.dequantize(), (weight.float() * wide).flatten(0, 1))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": {"text_config": {"eos_token_id": [5, 6]}}}, (5, 6)),
        ({"config.json": {"eos_token_id": 4, "text_config": {"eos_token_id": 5}}}, (4,)),
        (
            {
                "config.json": {"text_config": {"eos_token_id": 5}},
                "generation_config.json": {"eos_token_id": 7},
            },
            (7,),
        ),
    ],
)
def test_end_tokens_of_the_text_model(
    files: dict[str, dict[str, Any]], expected: tuple[int, ...], tmp_path: Path
) -> None:
    for name, contents in files.items():
        named = {"architectures": ["Gemma3ForConditionalGeneration"]} | contents
        (tmp_path / name).write_text(json.dumps(named))
    assert load_defaults(ModelSource(tmp_path), None).eos_token_ids == expected


@pytest.mark.parametrize("alternates", [True, False])
@pytest.mark.parametrize("kind", ["FP8 blocks", "FP8 of an expert", "4 bits"])
def test_quantized_stacks_of_experts_may_be_inputs_by_outputs(kind: str, alternates: bool) -> None:
    """They stay in FP8 where blocks have rows as they have columns; 4-bit codes are widened."""
    count, depth, size, block = 2, 256, 192, None if kind == "FP8 of an expert" else (128, 128)
    weight = torch.randn(count, depth, 2 * size).to(torch.float8_e4m3fn)
    scales = torch.rand(count, 2, 3) + 0.5 if block else torch.rand(count, 1, 1) + 0.5
    stack = Float8Experts(block).read({"": weight, "_scale_inv": scales})
    if kind == "4 bits":
        stack = quantize(stack.dequantize(), 4)
    moe = MoeSpec(num_experts=count, num_active=1, size=size)
    change = split_experts(moe, depth, alternates=alternates, may_transpose=not alternates)
    name = "model.layers.0.mlp.experts"
    found = dict(change(f"{name}.gate_up_proj.weight", stack))
    whole = stack.dequantize().unflatten(0, (count, depth)).mT  # [experts, outputs, inputs]
    for expert in range(count):
        for i, part in enumerate(("gate_proj", "up_proj")):
            own = found[f"{name}.{expert}.{part}.weight"]
            assert isinstance(own, torch.Tensor) == (kind == "4 bits")
            rows = slice(i, None, 2) if alternates else slice(i * size, (i + 1) * size)
            assert torch.equal(plain(own), whole[expert, rows])
    shapes = shapes_after({f"{name}.gate_up_proj.weight": tuple(stack.shape)}, [change])
    assert shapes == {own: tuple(part.shape) for own, part in found.items()}
