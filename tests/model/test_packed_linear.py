"""Packed projections are the plain ones, up to bf16's rounding."""

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from legato.checkpoint import loader
from legato.model.linear import Linear
from legato.model.packed_linear import can_pack

from .conftest import TINY, SaveTiny, load
from .dense import packed_logits

PROMPTS = [[(11 * i + 5) % 320 for i in range(n)] for n in (90, 1, 33)]


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
        Qwen3Config(**TINY, head_dim=32, tie_word_embeddings=True),
    ],
    ids=["biases", "tied"],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_packing_changes_no_more_than_rounding(
    config: PreTrainedConfig, dtype: str, save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_pack(getattr(torch, dtype), torch.device("cpu")):
        pytest.skip(f"this processor has no fast {dtype}")
    folder, _ = save_tiny(config)
    exact = packed_logits(load(folder, "float32"), PROMPTS)
    packed = load(folder, dtype)
    assert not any(isinstance(module, Linear) for module in packed.modules())
    monkeypatch.setattr(loader, "can_pack", lambda *_: False)
    plain = load(folder, dtype)
    assert any(isinstance(module, Linear) for module in plain.modules())
    assert packed.num_weight_bytes == plain.num_weight_bytes > 0
    for reference, a, b in zip(
        exact, packed_logits(plain, PROMPTS), packed_logits(packed, PROMPTS), strict=True
    ):
        assert _error(b, reference) < 1.5 * _error(a, reference) + 1e-3


def test_float32_is_not_packed(save_tiny: SaveTiny) -> None:
    folder, _ = save_tiny(LlamaConfig(**TINY))
    assert any(isinstance(module, Linear) for module in load(folder, "float32").modules())


def _error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    return float((logits - reference).square().mean().sqrt() / reference.square().mean().sqrt())
