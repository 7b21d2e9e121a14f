"""The kernels that executor tests run on, each with the model and the cache that go together."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch

from legato.executor.attention.base import AttentionBackend
from legato.executor.attention.native_backend import NativeAttentionBackend
from legato.executor.attention.torch_backend import TorchAttentionBackend
from legato.model.base import Model
from legato.model.native import NativeKernels, native_instructions
from legato.model.spec import DecoderSpec
from tests.model.random_models import CPU, native_model, random_decoder

BLOCK_SIZE = 32


@dataclass(frozen=True)
class Backend:
    """Attributes: tolerance: how far its log probabilities may be from exact ones."""

    name: str
    tolerance: float

    def make(self, spec: DecoderSpec, num_blocks: int) -> tuple[Model, AttentionBackend]:
        """The same weights on every backend, and a cache that holds no numbers yet."""
        sizes = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE}
        if self.name.startswith("torch"):
            plain = random_decoder(spec, getattr(torch, self.name.removeprefix("torch-")))
            torch_attention = TorchAttentionBackend(plain.cache, **sizes, device=CPU)
            torch_attention.blocks.fill_(torch.nan)
            return plain, torch_attention
        native = native_model(spec, NativeKernels(2, self.name))
        attention = NativeAttentionBackend(native, **sizes)
        attention.blocks.fill_(torch.nan)
        return native, attention


EXACT = Backend("torch-float32", 1e-4)
ROUNDED = Backend("torch-bfloat16", 0.1)
NATIVE = [Backend(name, 0.1) for name in ("amx", "avx512", "avx2")]


def params(backends: Iterable[Backend]) -> list[object]:
    """For `pytest.mark.parametrize`; what does not run here is skipped."""
    here = [EXACT.name, ROUNDED.name, *native_instructions()]
    return [
        pytest.param(
            backend,
            id=backend.name,
            marks=pytest.mark.skipif(
                backend.name not in here, reason=f"no {backend.name} kernels run here"
            ),
        )
        for backend in backends
    ]
