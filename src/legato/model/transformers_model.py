"""A decoder on transformers' own layers, whose projections and attention are Legato's.

It runs families that Legato has no layers for. Everything between the projections (norms, rope,
activations, residuals, experts) is transformers' code and PyTorch's operators.
"""

import json
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import ModelOutput

from legato.core.rows import CPU_ROWS
from legato.model.model import CacheSpec, LayerWatch, NamedWeights, StepAttention
from legato.model.native_attention import ReadsNativeCache
from legato.model.native_kernels import NativeKernels
from legato.model.native_operators import NativeProduct
from legato.model.native_support import LARGEST_HEAD, TILE_DEPTH
from legato.model.packing import PackingThreads
from legato.model.quantization import QuantizedWeight, plain
from legato.model.states import StepStates
from legato.model.transformers_attention import AttentionCall, attending
from legato.model.transformers_native import use_native_operators
from legato.model.transformers_paper import matrices, on_paper
from legato.model.transformers_spec import TransformersSpec

_Weight = torch.Tensor | QuantizedWeight


class TransformersModel:
    """A `Model` of transformers' layers on a CPU.

    Args:
        kernels: compute the projections, in bfloat16 or quantized; None for PyTorch's.
    """

    device = torch.device("cpu")
    rows = CPU_ROWS
    drops_rows = False
    """Its layers are one call of transformers."""

    def __init__(
        self, spec: TransformersSpec, *, dtype: torch.dtype, kernels: NativeKernels | None = None
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.num_weight_bytes = 0
        # As in `NativeModel`: PyTorch's threads would spin on the cores of the kernels' threads.
        self.num_torch_threads = None if kernels is None else 1
        self._kernels = kernels
        self._causal = on_paper(json.loads(spec.config), dtype)
        self._body = self._causal.get_decoder()
        self._head = self._causal.get_output_embeddings()
        self._given = _GivenHidden()

    @property
    def cache(self) -> CacheSpec:
        return self.spec.cache(self.dtype)

    @torch.inference_mode()
    def load_weights(self, weights: NamedWeights) -> None:
        """Load weights; projections are packed, a few at a time, while later ones are read."""
        linear = matrices(self._causal)
        parts: dict[str, dict[str, _Weight]] = {}
        num_threads = 1 if self._kernels is None else self._kernels.num_threads
        with PackingThreads(num_threads) as threads:
            packed: dict[str, Future[nn.Module]] = {}
            for name, weight in weights:
                self._count(name, weight)
                path, _, leaf = name.rpartition(".")
                if path not in linear:
                    self._set(path, leaf, plain(weight))
                else:
                    own = parts.setdefault(path, {})
                    own[leaf] = weight
                    if len(own) == 1 + (linear[path].bias is not None):
                        make = partial(self._product, linear[path], **parts.pop(path))
                        packed[path] = threads.pack(make)
                if name == self.spec.embedding and self.spec.tie_word_embeddings:
                    head = self.spec.head.removesuffix(".weight")
                    parts.setdefault(head, {})["weight"] = weight
            for path, own in parts.items():
                packed[path] = threads.pack(partial(self._product, linear[path], **own))
            for path, product in packed.items():
                self._causal.set_submodule(path, product.result())
        self._fill_buffers()
        if self._kernels is not None:
            use_native_operators(self._causal, self._kernels)
        path = next(name for name, module in self._causal.named_modules() if module is self._body)
        self._causal.set_submodule(path, self._given)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        *,
        states: StepStates | None = None,  # noqa: ARG002
        num_layers: int | None = None,
        watch: LayerWatch | None = None,
    ) -> torch.Tensor:
        assert watch is None, "rows are not dropped between transformers' layers"

        def attended(call: AttentionCall) -> torch.Tensor:
            return attention.attend(
                call.layer,
                call.query[0].transpose(0, 1),
                call.key[0].transpose(0, 1),
                call.value[0].transpose(0, 1),
                scale=call.scale,
                sliding_window=call.options.get("sliding_window"),
                softcap=call.options.get("softcap"),
                sinks=call.sinks,
            )

        with attending(attended), self._first_layers(num_layers):
            output = self._body(
                input_ids=input_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
            )
        self._given.kind = type(output)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        # The model's own factors and caps follow its projection.
        self._given.hidden = hidden.unsqueeze(0)
        ids = torch.zeros(1, len(hidden), dtype=torch.int64)
        logits: torch.Tensor = self._causal(input_ids=ids, use_cache=False).logits
        return logits[0].float()

    @contextmanager
    def _first_layers(self, num_layers: int | None) -> Iterator[None]:
        """Within the context, only so many layers run."""
        if num_layers is None:
            yield
            return
        name, layers = next(
            (name, child)
            for name, child in self._body.named_children()
            if isinstance(child, nn.ModuleList) and len(child) == self.spec.num_layers
        )
        setattr(self._body, name, layers[:num_layers])
        try:
            yield
        finally:
            setattr(self._body, name, layers)

    def _count(self, name: str, weight: _Weight) -> None:
        """Count the bytes that a step reads of a weight: few of an untied embedding."""
        if name == self.spec.embedding and not self.spec.tie_word_embeddings:
            return
        if isinstance(weight, QuantizedWeight):
            self.num_weight_bytes += weight.num_bytes(self.dtype)
        else:
            self.num_weight_bytes += weight.numel() * self.dtype.itemsize

    def _set(self, path: str, leaf: str, weight: torch.Tensor) -> None:
        """Replace a parameter, or a buffer, on paper by one in memory."""
        module = self._causal.get_submodule(path)
        on_paper = getattr(module, leaf)
        weight = weight.to(on_paper.dtype).contiguous().clone()
        if isinstance(on_paper, nn.Parameter):
            setattr(module, leaf, nn.Parameter(weight, requires_grad=False))
        else:
            setattr(module, leaf, weight)

    def _product(
        self, on_paper: nn.Module, weight: _Weight, bias: _Weight | None = None
    ) -> nn.Module:
        # Copies: a view of a file that is cut later ends the process.
        plain_bias = None if bias is None else plain(bias).clone()
        # Logits are not rounded: the best two may be close.
        dtype = torch.float32 if on_paper is self._head else self.dtype
        if self._kernels is not None and weight.shape[1] % TILE_DEPTH == 0:
            return NativeProduct(weight, plain_bias, dtype, self._kernels)
        return TorchProduct(plain(weight).to(self.dtype, copy=True), plain_bias, dtype)

    def _fill_buffers(self) -> None:
        """Compute the buffers that no checkpoint has, such as frequencies, as transformers does."""
        for parameter in self._causal.parameters():
            parameter._is_hf_initialized = True
        for module in self._causal.modules():
            missing = {name: b for name, b in module.named_buffers(recurse=False) if b.is_meta}
            for name, buffer in missing.items():
                setattr(module, name, torch.empty_like(buffer, device=self.device))
            if missing:
                self._causal._init_weights(module)


class NativeCacheTransformersModel(TransformersModel, ReadsNativeCache):
    """A `TransformersModel` that attends on native kernels, too."""

    def __init__(
        self, spec: TransformersSpec, *, dtype: torch.dtype, kernels: NativeKernels
    ) -> None:
        super().__init__(spec, dtype=dtype, kernels=kernels)
        self.kernels = kernels

    @property
    def num_heads(self) -> int:
        return self.spec.num_heads


def transformers_model(
    spec: TransformersSpec, *, dtype: torch.dtype, kernels: NativeKernels | None
) -> TransformersModel:
    """Make a model without weights, which attends on native kernels if they know its heads.

    Outside of native layers, they do not know sinks.
    """
    has_known_heads = spec.head_dim % TILE_DEPTH == 0 and spec.head_dim <= LARGEST_HEAD
    if kernels is not None and has_known_heads and not spec.has_sinks:
        return NativeCacheTransformersModel(spec, dtype=dtype, kernels=kernels)
    return TransformersModel(spec, dtype=dtype, kernels=kernels)


class TorchProduct(nn.Module):
    """A projection of PyTorch's. Its results have `dtype`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self._weight = weight.contiguous().clone()
        self._bias = None if bias is None else bias.to(weight.dtype)
        self._dtype = dtype

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [..., in] to [..., out]."""
        return F.linear(rows, self._weight, self._bias).to(self._dtype)


class _GivenHidden(nn.Module):
    """Stands for the layers where only the logits of given hidden states are computed.

    Attributes:
        hidden: [1, S, E].
        kind: class of the layers' outputs.
    """

    hidden: torch.Tensor
    kind: type[ModelOutput]

    def forward(self, *_: Any, **__: Any) -> ModelOutput:
        return self.kind(last_hidden_state=self.hidden)
