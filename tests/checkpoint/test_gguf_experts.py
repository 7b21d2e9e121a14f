"""GGUF files of mixtures of experts: a layer's experts are one tensor of each kind."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from benchmarks.formats.gguf_writers import quantize
from gguf import GGMLQuantizationType, RopeScalingType
from gguf.quants import dequantize
from transformers import PreTrainedModel

from legato.checkpoint.loader import open_checkpoint
from legato.core.config import ModelConfig
from legato.core.errors import UnsupportedModelError
from legato.engine.build.model_report import report_model
from legato.model.native_kernels import native_instructions
from tests.checkpoint.gguf_keys import check_keys
from tests.exactness.logits import chunked_logits
from tests.families.tiny import VOCAB_SIZE, WINDOW, Tiny, _yarn, random_model
from tests.model.conftest import assert_same_logits, load, load_native, reference_logits

from .test_gguf import gguf_writer

PROMPT = [(7 * i + 3 * i * i) % VOCAB_SIZE for i in range(60)]
NUM_EXPERTS = 6
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": 3,
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
}
"""Key a module of transformers, value its name in GGUF files of all families."""


class Family(NamedTuple):
    """Attributes:
    kind: format of the matrices, without the experts' down projections.
    down_kind: format of the down projections.
    second_norm: name of a layer's second norm.
    """

    tiny: Tiny
    kind: str
    down_kind: str
    second_norm: str = "ffn_norm"


FAMILIES = {
    "llama": Family(Tiny("mixtral", {**_SIZES, "head_dim": None}), "Q4_0", "Q8_0"),
    "qwen3moe": Family(
        Tiny(
            "qwen3_moe",
            {
                **_SIZES,
                "num_experts": NUM_EXPERTS,
                "moe_intermediate_size": 256,
                "norm_topk_prob": True,
            },
        ),
        "Q4_K",
        "Q6_K",
    ),
    "gpt-oss": Family(
        Tiny(
            "gpt_oss",
            {
                **_SIZES,
                "sliding_window": WINDOW,
                "rope_parameters": _yarn(truncate=False),
            },
        ),
        "MXFP4",
        "MXFP4",
        "post_attention_norm",
    ),
}
"""Key an architecture of GGUF files."""


class Twin(NamedTuple):
    """A file, and transformers' model with the weights that its codes stand for."""

    path: Path
    model: PreTrainedModel


@pytest.fixture(scope="module", params=FAMILIES)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    family = FAMILIES[request.param]
    model = random_model(family.tiny)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write(path, request.param, family, model)
    return Twin(path, model)


def write(path: Path, architecture: str, family: Family, model: PreTrainedModel) -> None:
    """Write a model as llama.cpp's converter does, and give it the weights that it is read as."""
    config = model.config
    writer = gguf_writer(path, architecture, config)
    writer.add_expert_count(NUM_EXPERTS)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture != "llama":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if architecture == "gpt-oss":
        writer.add_sliding_window(WINDOW)
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(64)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            for tensor_name, rows, put in tensors(name, parameter, architecture, family, config):
                wide = np.ascontiguousarray(rows.numpy())
                if rows.ndim == 1 or tensor_name.endswith(("inp.weight", ".bias")):
                    writer.add_tensor(tensor_name, wide)
                    continue
                kind = family.down_kind if "down_exps" in tensor_name else family.kind
                raw = quantize(wide.reshape(-1, wide.shape[-1]), kind)
                values = dequantize(raw, GGMLQuantizationType[kind]).reshape(wide.shape)
                put(torch.from_numpy(np.ascontiguousarray(values)))
                packed = raw.reshape(*wide.shape[:-1], -1)
                writer.add_tensor(tensor_name, packed, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


Put = Callable[[torch.Tensor], object]


def tensors(
    name: str, parameter: torch.Tensor, architecture: str, family: Family, config: object
) -> Iterator[tuple[str, torch.Tensor, Put]]:
    """Yield a parameter's tensors in the file, and what takes other values of each."""
    names = _NAMES | {"post_attention_layernorm": family.second_norm}
    parameter = parameter.detach()
    layer = ""
    if name.startswith("model.layers."):
        _, _, index, name = name.split(".", 3)
        layer = f"blk.{index}."
    if ".experts." in name:
        part = name.rpartition(".")[2]
        is_bias, is_turned = part.endswith("_bias"), architecture == "gpt-oss"
        rows = parameter.mT if is_turned and not is_bias else parameter
        kind = "bias" if is_bias else "weight"
        if part.startswith("down"):
            yield f"{layer}ffn_down_exps.{kind}", rows, rows.copy_
            return
        gates, ups = (rows[:, ::2], rows[:, 1::2]) if is_turned else rows.chunk(2, dim=1)
        yield f"{layer}ffn_gate_exps.{kind}", gates, gates.copy_
        yield f"{layer}ffn_up_exps.{kind}", ups, ups.copy_
        return
    module, _, kind = (name, "", "weight") if name.endswith("sinks") else name.rpartition(".")
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    own = names[module]
    if architecture == "llama" and own in heads:
        num_heads = getattr(config, heads[own])
        # llama.cpp rotates neighbours: see `undo_interleaving`.
        halves = parameter.view(num_heads, 2, -1, parameter.shape[1]).transpose(1, 2)
        yield (
            f"{layer}{own}.{kind}",
            halves.reshape(parameter.shape),
            lambda values: halves.copy_(values.view(halves.shape)),
        )
        return
    yield f"{layer}{own}.{kind}", parameter, parameter.copy_


def test_logits_are_those_of_the_dequantized_weights(twin: Twin) -> None:
    logits = chunked_logits(load(twin.path, "float32"), PROMPT, 7, len(PROMPT))
    assert_same_logits(logits, reference_logits(twin.model, PROMPT))


@pytest.mark.skipif(not native_instructions(), reason="no native kernels run here")
def test_experts_stay_quantized_in_native_layers(twin: Twin) -> None:
    model = load_native(twin.path, "gguf")
    num_weights = sum(parameter.numel() for parameter in twin.model.parameters())
    assert 8 * model.num_weight_bytes / num_weights < 8.5
    logits = chunked_logits(model, PROMPT, 33, len(PROMPT))
    expected = reference_logits(twin.model, PROMPT)
    # Rounding sends a few rows to other experts.
    errors = (logits - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.median()) < 0.05


def test_every_key_is_accounted_for(twin: Twin) -> None:
    check_keys(twin.path)


def test_described_by_headers(twin: Twin) -> None:
    report = report_model(ModelConfig(model=str(twin.path)))
    assert report.num_parameters == sum(p.numel() for p in twin.model.parameters())
    assert report.weight_bytes < report.widened_weight_bytes or report.why_not_native


DAMAGE = {
    "expert_count": r"mlp\.experts\.\w+\.weight has shape|mlp\.gate\.weight has shape",
    "expert_used_count": "7 experts .* cannot be picked",
}


@pytest.mark.parametrize("key", DAMAGE)
def test_false_numbers_of_experts_are_refused(key: str, tmp_path: Path) -> None:
    family = FAMILIES["qwen3moe"]
    path = tmp_path / "model.gguf"
    write(path, "qwen3moe", family, random_model(family.tiny))
    data = path.read_bytes()
    name = f"qwen3moe.{key}".encode()
    place = data.index(name) + len(name) + 4
    path.write_bytes(data[:place] + (7).to_bytes(4, "little") + data[place + 4 :])
    with pytest.raises(UnsupportedModelError, match=DAMAGE[key]):
        load(path)


def test_a_truncated_tensor_is_refused(twin: Twin, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(twin.path.read_bytes()[:-3000])
    with pytest.raises(UnsupportedModelError, match=r"cut short: \S+ lies past its end"):
        open_checkpoint(ModelConfig(model=str(path)))
