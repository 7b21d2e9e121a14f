"""The kernels that executor tests run on, each with the model and the cache that go together."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
import torch

from legato.executor.attention.attention_backend import AttentionBackend
from legato.executor.attention.native_backend import NativeAttentionBackend
from legato.executor.attention.torch_backend import TorchAttentionBackend
from legato.model.model import Model
from legato.model.native_kernels import NativeKernels
from legato.model.spec import DecoderSpec
from tests.executor.instructions import RUNNABLE, module_of
from tests.model.random_models import CPU, native_model, random_decoder

BLOCK_SIZE = 32


@dataclass(frozen=True)
class Backend:
    """Attributes:
    tolerance: how far its log probabilities may be from exact ones.
    is_quantized: its cache is.
    """

    name: str
    tolerance: float
    is_quantized: bool = False

    @property
    def kernels(self) -> str:
        """PyTorch's by their dtype, or native ones: by emulation if the processor lacks them."""
        name = self.name.removesuffix("-int8")
        return module_of(name) or name

    def make(self, spec: DecoderSpec, num_blocks: int) -> tuple[Model, AttentionBackend]:
        """The same weights on every backend, and a cache that holds no numbers yet."""
        sizes = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE}
        model, attention = self._make(spec, sizes)
        # As floats, all bits set are NaN.
        attention.blocks[0].fill_(-1 if self.is_quantized else torch.nan)
        return model, attention

    def _make(self, spec: DecoderSpec, sizes: dict[str, int]) -> tuple[Model, AttentionBackend]:
        if self.kernels.startswith("torch"):
            plain = random_decoder(spec, getattr(torch, self.kernels.removeprefix("torch-")))
            cache = replace(plain.cache, is_quantized=self.is_quantized)
            return plain, TorchAttentionBackend(cache, **sizes, device=CPU)
        native = native_model(spec, NativeKernels(2, self.kernels))
        cache = replace(native.cache, is_quantized=self.is_quantized)
        return native, NativeAttentionBackend(native, cache, **sizes)


EXACT = Backend("torch-float32", 1e-4)
ROUNDED = Backend("torch-bfloat16", 0.1)
NATIVE = [Backend(name, 0.1) for name in ("amx", "avx512", "avx2")]
QUANTIZED = [
    Backend(f"{plain.name}-int8", max(plain.tolerance, 0.15), is_quantized=True)
    for plain in (EXACT, *NATIVE)
]
"""With a cache of 8 bits."""


def params(backends: Iterable[Backend]) -> list[object]:
    """For `pytest.mark.parametrize`; what does not run here is skipped."""
    here = [EXACT.name, ROUNDED.name, *RUNNABLE]
    return [
        pytest.param(
            backend,
            id=backend.name,
            marks=pytest.mark.skipif(
                backend.kernels not in here, reason=f"no {backend.kernels} kernels run here"
            ),
        )
        for backend in backends
    ]
