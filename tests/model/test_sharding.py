"""Parts of a model, which together are the whole."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from legato.checkpoint.base import Checkpoint
from legato.checkpoint.loader import load_model
from legato.core.errors import ConfigError
from legato.model import sharding
from legato.model.base import StepAttention
from legato.model.communicator import ALONE, Communicator
from legato.model.quantization import BLOCK, QuantizedWeight, plain, quantize
from legato.model.sharding import shard
from legato.model.spec import DecoderSpec
from tests.model.random_models import CPU, EXPERTS, SPECS, VOCAB_SIZE, decoder_spec, random_decoder
from tests.model.ranks import on_all_ranks
from tests.profiles import examples


class Rank:
    """A `Communicator` that is asked for its place alone."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    gather = sum


class CausalAttention:
    """Of one prompt in a step of its own."""

    def __init__(self) -> None:
        # Key a layer, value its keys and values.
        self._written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        del sliding_window, softcap, sinks
        if key is None or value is None:
            key, value = self._written[layer]
        self._written[layer] = key, value
        heads = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            *heads, is_causal=True, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


def checkpoint_of(spec: DecoderSpec) -> Checkpoint:
    slots = random_decoder(spec, torch.float32).checkpoint_slots()
    return Checkpoint(
        name="random",
        spec=spec,
        dtype=torch.float32,
        shapes={name: tuple(weight.shape) for name, weight in slots.items()},
        tensors=lambda _: slots.items(),
    )


def logits(checkpoint: Checkpoint, communicator: Communicator = ALONE) -> torch.Tensor:
    model = load_model(checkpoint, dtype=torch.float32, device=CPU, communicator=communicator)
    attention: StepAttention = CausalAttention()
    ids = torch.arange(11) * 7 % VOCAB_SIZE
    with torch.inference_mode():
        return model.compute_logits(model.forward(ids, torch.arange(11), attention))


DIVISIBLE = {
    "grouped": (2, SPECS["grouped"]),
    "four ranks": (4, decoder_spec(num_kv_heads=4)),
    "tokens that do not divide": (3, decoder_spec(num_heads=6, num_kv_heads=3)),
    "biases": (2, SPECS["biases"]),
    "normed heads, untied": (2, SPECS["normed heads, untied"]),
    **{name: (2, spec) for name, spec in EXPERTS.items()},
}


@pytest.mark.parametrize("name", DIVISIBLE)
def test_ranks_together_compute_what_one_does(name: str) -> None:
    num_ranks, spec = DIVISIBLE[name]
    checkpoint = checkpoint_of(spec)
    expected = logits(checkpoint)
    found = on_all_ranks(num_ranks, lambda communicator: logits(checkpoint, communicator))[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_each_rank_has_the_sinks_of_its_heads() -> None:
    part = plain(shard("model.layers.0.self_attn.sinks", torch.arange(4.0), Rank(1, 2)))
    assert part.tolist() == [2.0, 3.0]


def test_experts_that_do_not_divide_are_refused() -> None:
    spec = decoder_spec(num_kv_heads=4, experts={"size": 66})
    with pytest.raises(ConfigError, match=r"of 66 or 96 cannot be divided among 4 ranks"):
        spec.part(4)


def test_heads_that_do_not_divide_are_refused() -> None:
    spec = decoder_spec(num_heads=9, num_kv_heads=3, intermediate_size=96)
    with pytest.raises(ConfigError, match=r"among 2 ranks: --tensor-parallel-size takes 1, 3 "):
        spec.part(2)
    assert spec.part(3).num_heads == 3


@given(
    num_ranks=st.integers(1, 5),
    num_rows=st.integers(1, 40),
    count=st.integers(1, 3),
    bits=st.sampled_from([None, 4, 8]),
    name=st.sampled_from(["model.embed_tokens", "model.layers.0.mlp.down_proj"]),
)
@examples(60)
def test_parts_are_the_whole(
    num_ranks: int, num_rows: int, count: int, bits: int | None, name: str
) -> None:
    """Of quantized weights, too, whether or not their blocks are cut."""
    whole: torch.Tensor | QuantizedWeight = torch.randn(
        num_rows, count * math.lcm(BLOCK, num_ranks)
    )
    if bits is not None:
        whole = quantize(plain(whole), bits)
    parts = [plain(shard(f"{name}.weight", whole, Rank(i, num_ranks))) for i in range(num_ranks)]
    assert len({part.shape for part in parts}) == 1
    joined = torch.cat(parts, dim=int("down_proj" in name))
    torch.testing.assert_close(joined[:num_rows], plain(whole), rtol=0, atol=0)
    assert not joined[num_rows:].any()


def test_codes_whose_blocks_are_cut_become_numbers() -> None:
    whole = quantize(torch.randn(4, 96), 8)
    parts = [shard("model.layers.0.mlp.down_proj.weight", whole, Rank(i, 2)) for i in range(2)]
    assert all(isinstance(part, torch.Tensor) for part in parts)
    torch.testing.assert_close(torch.cat(list(map(plain, parts)), dim=1), whole.dequantize())


@pytest.mark.parametrize("config", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_layers_are_divided_as_transformers_says(config: type) -> None:
    plan = {
        name.removeprefix("layers.*."): division
        for name, division in config.base_model_tp_plan.items()
        if division in ("colwise", "rowwise")
    }
    assert plan == sharding._OF_LAYER


def test_a_rank_reads_its_part_of_a_file_alone() -> None:
    """Of a weight with NaN in it, the ranks whose part has none see nothing wrong."""
    spec = SPECS["grouped"]
    checkpoint = checkpoint_of(spec)
    name = "model.layers.0.mlp.gate_proj.weight"
    dict(checkpoint.tensors(CPU))[name][-1, 0] = torch.nan
    first = load_model(checkpoint, dtype=torch.float32, device=CPU, communicator=Rank(0, 2))
    assert first.num_weight_bytes < sum(w.nbytes for _, w in checkpoint.tensors(CPU))
    with pytest.raises(Exception, match=f"{name} has nan"):
        load_model(checkpoint, dtype=torch.float32, device=CPU, communicator=Rank(1, 2))
