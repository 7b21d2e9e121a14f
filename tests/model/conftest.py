"""Tiny random checkpoints made with transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from legato.checkpoint.loader import load_model, open_checkpoint, resolve_dtype
from legato.core.config import ModelConfig, Quantization
from legato.model.decoder import Decoder
from legato.model.native_kernels import NativeKernels, native_instructions
from legato.model.native_model import NativeModel

TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, prompt: Sequence[int]) -> torch.Tensor:
    return model(torch.tensor([prompt])).logits[0]


def assert_same_logits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def load(path: Path | str, dtype: str = "auto") -> Decoder:
    config = ModelConfig(model=str(path), dtype=dtype)
    checkpoint = open_checkpoint(config)
    dtype = resolve_dtype(config, checkpoint)
    model = load_model(checkpoint, dtype=dtype, device=torch.device("cpu"))
    assert isinstance(model, Decoder)
    return model


def load_native(path: Path, quantization: Quantization | None = None) -> NativeModel:
    """Load a model into native layers, on one thread of the fastest kernels that run here."""
    config = ModelConfig(model=str(path), quantization=quantization)
    model = load_model(
        open_checkpoint(config),
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        kernels=NativeKernels(1, native_instructions()[0]),
        quantization=quantization,
    )
    assert isinstance(model, NativeModel)
    return model


SaveTiny = Callable[..., tuple[Path, PreTrainedModel]]


@pytest.fixture
def save_tiny(tmp_path: Path) -> SaveTiny:
    """Make a random model of a configuration, save it, and return its folder and the model."""

    def save(config: PreTrainedConfig, **options: object) -> tuple[Path, PreTrainedModel]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            # Biases and norms start at 0 and 1, where mixing them up would go unseen.
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
            else:
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(tmp_path, **options)
        return tmp_path, model

    return save
