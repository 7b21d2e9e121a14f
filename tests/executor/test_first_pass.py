"""A model of finite weights whose products are none is refused, and the layer named."""

from collections.abc import Callable

import pytest
import torch

from legato.core.errors import UnsupportedModelError
from legato.executor.attention.attention_backend import AttentionBackend
from legato.executor.attention.native_backend import NativeAttentionBackend
from legato.executor.attention.torch_backend import TorchAttentionBackend
from legato.executor.first_pass import check_forward
from legato.model.model import Model
from legato.model.native_kernels import NativeKernels, native_instructions
from legato.model.native_model import NativeModel
from legato.model.spec import DecoderSpec
from tests.model.random_models import CPU, decoder_spec, random_decoder

BLOCK_SIZE = 32
SPEC = decoder_spec(sliding_windows=(None,) * 3, tie_word_embeddings=False)

Make = Callable[[dict[str, float]], tuple[Model, AttentionBackend]]
"""Makes a model in which the weights of some tensors, by name, are all the same value."""


def weights(spec: DecoderSpec, changes: dict[str, float]) -> dict[str, torch.Tensor]:
    slots = random_decoder(spec, torch.bfloat16).checkpoint_slots()
    for name, value in changes.items():
        slots[name].fill_(value)
    return slots


def torch_model(changes: dict[str, float]) -> tuple[Model, AttentionBackend]:
    model = random_decoder(SPEC, torch.float32)
    model.load_weights(weights(SPEC, changes).items())
    sizes = {"num_blocks": 2, "block_size": BLOCK_SIZE}
    return model, TorchAttentionBackend(model.cache, **sizes, device=CPU)


def native_model(changes: dict[str, float]) -> tuple[Model, AttentionBackend]:
    if not native_instructions():
        pytest.skip("no native kernels run here")
    model = NativeModel(SPEC, NativeKernels(1, native_instructions()[0]))
    model.load_weights(weights(SPEC, changes).items())
    return model, NativeAttentionBackend(model, model.cache, num_blocks=2, block_size=BLOCK_SIZE)


def check(made: tuple[Model, AttentionBackend], vocab_size: int = SPEC.vocab_size) -> None:
    check_forward(*made, block_size=BLOCK_SIZE, vocab_size=vocab_size, max_len=64)


@pytest.mark.parametrize("make", [torch_model, native_model])
class TestBothKinds:
    def test_a_sound_model_passes(self, make: Make) -> None:
        check(make({}))
        check(make({}), vocab_size=1)

    @pytest.mark.parametrize("layer", range(3))
    def test_products_that_overflow(self, make: Make, layer: int) -> None:
        mlp = f"model.layers.{layer}.mlp"
        made = make({f"{mlp}.gate_proj.weight": 3e30, f"{mlp}.up_proj.weight": 3e30})
        with pytest.raises(UnsupportedModelError, match=rf"^model\.layers\.{layer} computes NaN"):
            check(made)

    def test_an_output_projection_that_overflows(self, make: Make) -> None:
        with pytest.raises(UnsupportedModelError, match="the output projection computes NaN"):
            check(make({"lm_head.weight": 3e38, "model.norm.weight": 1e5}))
