"""Parts of a model, which together are the whole."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from legato.checkpoint.checkpoint import Checkpoint
from legato.checkpoint.loader import load_model
from legato.core.errors import ConfigError
from legato.model import sharding
from legato.model.communicator import ALONE, Communicator
from legato.model.decoder import Decoder
from legato.model.mixer_spec import DeltaNetSpec, Mamba2Spec, RecurrenceSpec, ShortConvSpec
from legato.model.model import StepAttention
from legato.model.native_kernels import NativeKernels
from legato.model.native_recurrence import NativeMixer
from legato.model.quantization import BLOCK, QuantizedWeight, plain, quantize
from legato.model.recurrence import RecurrentMixer
from legato.model.sharding import shard
from legato.model.spec import DecoderSpec
from legato.model.states import StateRun, StepStates, make_states
from tests.executor.instructions import TESTED
from tests.model.dense import DenseAttention
from tests.model.random_models import (
    CPU,
    EXPERTS,
    SPECS,
    VOCAB_SIZE,
    decoder_spec,
    random_decoder,
    with_recurrence,
)
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


def checkpoint_of(spec: DecoderSpec) -> Checkpoint:
    slots = random_decoder(spec, torch.float32).checkpoint_slots()
    return Checkpoint(
        name="random",
        spec=spec,
        dtype=torch.float32,
        shapes={name: tuple(weight.shape) for name, weight in slots.items()},
        tensors=lambda _: slots.items(),
    )


def logits(
    checkpoint: Checkpoint, communicator: Communicator = ALONE, mixers: str = "torch"
) -> torch.Tensor:
    """Return the logits of a prompt in one step.

    Args:
        mixers: "torch", or the instructions of native kernels.
    """
    model = load_model(checkpoint, dtype=torch.float32, device=CPU, communicator=communicator)
    assert isinstance(model, Decoder)
    ids = torch.arange(11) * 7 % VOCAB_SIZE
    attention: StepAttention = DenseAttention([len(ids)])
    states: StepStates | None = None
    if shapes := model.spec.states:
        states = StepStates(make_states(shapes, 2, model.dtype, CPU), [StateRun(0, 11, 0, 0, 1)])
    with torch.inference_mode():
        if mixers != "torch":
            kernels = NativeKernels(1, mixers)
            for module in model.modules():
                if isinstance(module, RecurrentMixer):
                    module.native = NativeMixer(module, kernels)
        hidden = model.forward(ids, torch.arange(11), attention, states=states)
        return model.compute_logits(hidden)


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


def mamba(num_groups: int, **fields: Any) -> Mamba2Spec:
    sizes = {"num_heads": 8, "head_dim": 16, "state_size": 16, "num_groups": num_groups}
    return Mamba2Spec(**sizes, **fields)


RECURRENT: dict[str, tuple[int, RecurrenceSpec]] = {
    "short convolution": (4, ShortConvSpec(num_channels=64, kernel_size=3, has_bias=True)),
    "delta net": (4, DeltaNetSpec(num_heads=8, num_key_heads=4, key_dim=16, value_dim=32)),
    "Mamba-2": (2, mamba(4, has_bias=True, scales=(1.5, 0.5, 0.75, 1.25, 0.8))),
    "Mamba-2, a group a rank": (4, mamba(4, norm="before_gate")),
    "Mamba-2, one group": (2, mamba(1)),
    "Mamba-2, ranks that share groups": (4, mamba(2)),
    "Mamba-2, a shared norm before gates": (4, mamba(2, norm="before_gate")),
    "Mamba-2 without a norm": (4, mamba(1, norm=None)),
}
"""Key a name, value the number of ranks and a mixer."""


@pytest.mark.parametrize("mixers", ["torch", *TESTED[:1]])
@pytest.mark.parametrize("name", RECURRENT)
def test_ranks_divide_recurrent_mixers(name: str, mixers: str) -> None:
    num_ranks, own = RECURRENT[name]
    heads = {"num_heads": 4, "num_kv_heads": 4}
    spec = with_recurrence(own, hidden_size=64, intermediate_size=64, **heads)
    checkpoint = checkpoint_of(spec)
    expected = logits(checkpoint)
    found = on_all_ranks(num_ranks, lambda group: logits(checkpoint, group, mixers))[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-5 * float(expected.abs().max()))
    whole, part = (one.states[0].num_bytes(torch.float32) for one in (spec, spec.part(2)))
    assert part < 0.6 * whole


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (ShortConvSpec(num_channels=66, kernel_size=3), "66 channels of short convolutions"),
        (RECURRENT["delta net"][1].part(2), "2 key heads of delta nets"),
        (mamba(8).part(4), "2 x 1 heads of Mamba-2"),
    ],
)
def test_recurrent_mixers_that_do_not_divide_are_refused(own: RecurrenceSpec, words: str) -> None:
    heads = {"num_heads": 4, "num_kv_heads": 4}
    spec = with_recurrence(own, hidden_size=64, intermediate_size=64, **heads)
    assert spec.part(2)
    with pytest.raises(ConfigError, match=rf"{words} .* among 4 ranks: .* takes 1, 2 for this"):
        spec.part(4)


def test_groups_that_ranks_cannot_share_are_refused() -> None:
    spec = with_recurrence(
        Mamba2Spec(num_heads=12, num_groups=3, head_dim=16, state_size=16), hidden_size=64
    )
    with pytest.raises(ConfigError, match=r"3 x 4 heads of Mamba-2 .* among 2 ranks"):
        spec.part(2)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_of_fused_projections_stay_codes(bits: int) -> None:
    """A rank has its rows of each part, and its columns of the output."""
    own = mamba(2)
    spec = with_recurrence(own, hidden_size=64)
    whole = quantize(torch.randn(sum(own.parts), 64), bits)
    prefix = "model.layers.1.recurrence"
    for rank in range(2):
        part = shard(f"{prefix}.in_proj.weight", whole, spec, Rank(rank, 2))
        assert isinstance(part, QuantizedWeight)
        rows = [p.chunk(2)[rank] for p in torch.split(whole.dequantize(), list(own.parts))]
        assert torch.equal(part.dequantize(), torch.cat(rows))
        column = shard(
            f"{prefix}.out_proj.weight", quantize(torch.randn(64, 128), bits), spec, Rank(rank, 2)
        )
        assert isinstance(column, QuantizedWeight)
        assert column.shape == (64, 64)


def test_each_rank_has_the_sinks_of_its_heads() -> None:
    name, spec = "model.layers.0.self_attn.sinks", SPECS["sinks"]
    part = plain(shard(name, torch.arange(4.0), spec, Rank(1, 2)))
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
    ranks = [Rank(i, num_ranks) for i in range(num_ranks)]
    parts = [plain(shard(f"{name}.weight", whole, SPECS["grouped"], rank)) for rank in ranks]
    assert len({part.shape for part in parts}) == 1
    joined = torch.cat(parts, dim=int("down_proj" in name))
    torch.testing.assert_close(joined[:num_rows], plain(whole), rtol=0, atol=0)
    assert not joined[num_rows:].any()


def test_codes_whose_blocks_are_cut_become_numbers() -> None:
    whole = quantize(torch.randn(4, 96), 8)
    name, spec = "model.layers.0.mlp.down_proj.weight", SPECS["grouped"]
    parts = [shard(name, whole, spec, Rank(i, 2)) for i in range(2)]
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
