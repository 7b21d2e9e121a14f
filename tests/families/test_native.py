"""Native layers in bfloat16 are as close to transformers in float32 as PyTorch's layers are.

So are partly native ones, which models with recurrent layers have.
"""

from functools import partial
from pathlib import Path

import pytest
import torch

from legato.checkpoint.loader import load_model, open_checkpoint
from legato.core.config import ModelConfig, Quantization
from legato.model.experts import MixtureOfExperts
from legato.model.native_kernels import NativeKernels
from legato.model.native_operators import NativeMixture
from legato.model.native_support import why_not_native
from legato.model.partly_native import PartlyNativeDecoder
from legato.model.quantization import quantize
from tests.executor.instructions import TESTED
from tests.executor.test_native import CPU
from tests.executor.test_native import pytestmark as needs_native
from tests.families.chunked import CHUNKS, chunked_logits
from tests.families.conftest import Saved
from tests.families.tiny import MODELS, VOCAB_SIZE
from tests.model.conftest import reference_logits

pytestmark = needs_native

NOT_NATIVE = {
    "gemma4-26b-a4b": "mixture is Moe, not none",
    "cohere2": "order is 'parallel', not pre or post or sandwich, with experts pre",
    "starcoder2": "is_gated is False, not True",
    "gpt-neox": "activation is 'gelu', not silu or gelu_tanh",
    "gpt-neox-sequential": "activation is 'gelu', not silu or gelu_tanh",
    "apertus": "activation is 'xielu', not silu or gelu_tanh",
    "arcee": "activation is 'relu2', not silu or gelu_tanh",
    **dict.fromkeys(("llama4", "llama4-maverick"), "is_chunked is True, not False"),
    **dict.fromkeys(
        (
            *("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm4-moe-lite"),
            *("deepseek-v3.2", "glm-5", "mistral4", "youtu", "minicpm3"),
        ),
        "latent is LatentAttention, not none",
    ),
}
"""Key a model, value why PyTorch's layers run it."""


@pytest.mark.parametrize("name", MODELS)
def test_native_layers_are_as_exact_as_pytorch(name: str, saved: Saved) -> None:
    folder, reference = saved(name)
    checkpoint = open_checkpoint(ModelConfig(model=str(folder)))
    assert why_not_native(checkpoint.spec, torch.bfloat16, CPU) == NOT_NATIVE.get(name, "")
    if name in NOT_NATIVE:
        return
    prompt = [(7 * i + 3 * i * i) % VOCAB_SIZE for i in range(CHUNKS[-1])]
    exact = reference_logits(reference, prompt)
    allowed = (_logits(folder, prompt, None) - exact).abs()
    largest = float(exact.abs().max())
    has_experts = any(layer.moe is not None for layer in checkpoint.spec.layers)
    for instructions in TESTED:
        error = (_logits(folder, prompt, NativeKernels(2, instructions)) - exact).abs()
        if has_experts:
            assert_most_rows_as_exact(error, allowed, largest)
            continue
        assert float(error.mean()) <= 1.2 * float(allowed.mean()) + 0.002 * largest, instructions
        assert float(error.max()) <= 1.5 * float(allowed.max()) + 0.01 * largest, instructions


@pytest.mark.parametrize(
    "name",
    [
        "lfm2",
        "qwen3.5",
        "granite-4-h",
        "falcon-h1",
        "qwen3.5-moe",
        "granite-4-h-moe",
        "lfm2-moe",
        "nemotron-3",
    ],
)
def test_partly_native_layers_multiply_with_codes(name: str, saved: Saved) -> None:
    """As exact as PyTorch's layers with the same weights widened."""
    folder, _ = saved(name)
    bounds = (0, 80, 81, 88)  # rows of a long chunk are not rounded
    prompt = [(7 * i + 3 * i * i) % VOCAB_SIZE for i in range(bounds[-1])]
    codes = partial(_logits, folder, prompt, bounds=bounds, quantization="int8")
    exact = codes(None, dtype=torch.float32)
    allowed = (codes(None) - exact).abs()
    largest = float(exact.abs().max())
    for instructions in TESTED:
        error = (codes(NativeKernels(2, instructions)) - exact).abs()
        assert float(error.mean()) <= 1.2 * float(allowed.mean()) + 0.01 * largest, instructions
        assert float(error.max()) <= 1.5 * float(allowed.max()) + 0.05 * largest, instructions


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_step_times_of_partly_native_models_know_of_unpacking(
    quantization: Quantization | None, saved: Saved
) -> None:
    folder, _ = saved("granite-4-h-moe")
    kernels = NativeKernels(2, TESTED[0])
    model = load_model(
        open_checkpoint(ModelConfig(model=str(folder))),
        dtype=torch.bfloat16,
        device=CPU,
        kernels=kernels,
        quantization=quantization,
    )
    most = 0 if quantization is None else kernels.most_packed(quantize(torch.randn(64, 64), 4))
    assert model.rows.most_packed == most


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("granite-4-h-moe", ""),
        ("qwen3-next", ""),
        ("nemotron-3", ""),
        ("nemotron-3-latent", "latent_size is 64, not none"),
    ],
)
def test_experts_beside_recurrences_are_native_unless_refused(
    name: str, reason: str, saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = saved(name)
    checkpoint = open_checkpoint(ModelConfig(model=str(folder)))
    with caplog.at_level("INFO"):
        model = load_model(
            checkpoint, dtype=torch.bfloat16, device=CPU, kernels=NativeKernels(2, TESTED[0])
        )
    assert isinstance(model, PartlyNativeDecoder)
    kinds = {type(module) for module in model.modules()}
    assert (MixtureOfExperts in kinds) == bool(reason)
    assert (NativeMixture in kinds) != bool(reason)
    assert model.num_torch_threads == (None if reason else 1)
    said = [record.message for record in caplog.records if "experts" in record.message]
    words = f"PyTorch computes the experts, more slowly than native kernels: {reason}"
    assert said == ([words] if reason else [])


@pytest.mark.parametrize("name", ["gemma4-e2b", "gemma4-12b"])
def test_rows_deeper_than_a_matrix_are_rounded_to_its_depth(name: str, saved: Saved) -> None:
    """Layers of two geometries share working memory, but not the numbers that are left there."""
    folder, _ = saved(name)
    prompt = [(7 * i + 3 * i * i) % VOCAB_SIZE for i in range(CHUNKS[-1])]
    exact = _logits(folder, prompt, None, dtype=torch.float32)
    allowed = (_logits(folder, prompt, None, quantization="int8") - exact).abs()
    for instructions in TESTED:
        kernels = NativeKernels(2, instructions)
        error = (_logits(folder, prompt, kernels, quantization="w8a8") - exact).abs()
        assert float(error.mean()) <= 1.7 * float(allowed.mean()), instructions


def assert_most_rows_as_exact(error: torch.Tensor, allowed: torch.Tensor, largest: float) -> None:
    """Compare the rows that rounding has not sent to other experts: those are a few of all.

    Args:
        error, allowed: absolute errors [T, V], of native layers and of PyTorch's.
        largest: logit.
    """
    for share in (0.5, 0.75):
        found, limit = (float(errors.mean(1).quantile(share)) for errors in (error, allowed))
        assert found <= 1.2 * limit + 0.002 * largest


def _logits(
    folder: Path,
    prompt: list[int],
    kernels: NativeKernels | None,
    *,
    bounds: tuple[int, int, int, int] = CHUNKS,
    quantization: Quantization | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Return logits, computed in chunks, on PyTorch's layers without kernels."""
    checkpoint = open_checkpoint(ModelConfig(model=str(folder)))
    model = load_model(
        checkpoint, dtype=dtype, device=CPU, kernels=kernels, quantization=quantization
    )
    return chunked_logits(model, prompt, bounds=bounds)
