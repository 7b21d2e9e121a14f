"""A decoder on PyTorch's layers, whose products, attention and recurrent mixers are native.

Models with recurrent layers run so: native layers in one call do not know their mixers. What is
left to PyTorch is small: norms, rope, gates of heads, sums, and experts.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeGuard

import torch
from torch import nn

from legato.model.base import NamedWeights
from legato.model.communicator import ALONE, Communicator
from legato.model.decoder import Decoder
from legato.model.layers import MLP, FusedLinear, Linear
from legato.model.native import NativeKernels, ReadsNativeCache
from legato.model.native_operators import PANEL, NativeMLP, NativeProduct
from legato.model.native_recurrence import NativeMixer
from legato.model.native_support import TILE_DEPTH
from legato.model.native_weights import DTYPE, Weight, join
from legato.model.quantization import copy_plain, plain
from legato.model.recurrence import RecurrentMixer
from legato.model.spec import DecoderSpec

_HEAD, _EMBEDDING = "lm_head", "model.embed_tokens.weight"
_MLP_PARTS = ("gate_proj", "up_proj", "down_proj")


class _Site(NamedTuple):
    """A projection that becomes a `NativeProduct`.

    Attributes:
        names: of its parts in checkpoints, without ".weight" and ".bias".
        dtype: of its results.
    """

    names: tuple[str, ...]
    has_bias: bool
    dtype: torch.dtype = DTYPE


class PartlyNativeDecoder(Decoder, ReadsNativeCache):
    """A `Decoder` in bfloat16 that has native parts once its weights are loaded.

    Args:
        spec: of the whole decoder.
        kernels: to run on.
        communicator: to the other ranks.
    """

    def __init__(
        self, spec: DecoderSpec, kernels: NativeKernels, communicator: Communicator = ALONE
    ) -> None:
        super().__init__(spec, dtype=DTYPE, device=torch.device("cpu"), communicator=communicator)
        self.kernels = kernels
        self.rows = kernels.rows
        # As in `NativeModel`, PyTorch's threads would spin on the cores of the kernels' threads.
        # But experts are products of PyTorch's.
        has_experts = any(layer.moe is not None for layer in self.spec.layers)
        self.num_torch_threads = None if has_experts else 1

    @property
    def num_heads(self) -> int:
        return self.spec.num_heads

    @torch.inference_mode()
    def load_weights(self, weights: NamedWeights) -> None:
        """Load weights, and keep quantized ones of products so, except mixed matrices.

        A product is packed once all its parts are read, while later ones are read.
        """
        slots, sites = self.checkpoint_slots(), dict(self._sites())
        site_of = {part: path for path, site in sites.items() for part in site.names}
        unpacked: dict[str, dict[str, Weight]] = {}  # key the site's path
        self.num_weight_bytes = 0
        with ThreadPoolExecutor(self.kernels.num_threads) as threads:
            packed: dict[str, Future[NativeProduct]] = {}
            for name, weight in weights:
                if self.spec.reads_every_step(name):
                    self.num_weight_bytes += _num_bytes(weight)
                path = site_of.get(name.rpartition(".")[0])
                if path is None:
                    copy_plain(weight, slots[name])
                else:
                    own, site = unpacked.setdefault(path, {}), sites[path]
                    own[name] = weight
                    if len(own) == len(site.names) * (1 + site.has_bias):
                        packed[path] = threads.submit(self._product, site, unpacked.pop(path))
                if name == _EMBEDDING and self.spec.tie_word_embeddings:
                    head = partial(NativeProduct, weight, None, torch.float32, self.kernels)
                    packed[_HEAD] = threads.submit(head)
            products = {path: product.result() for path, product in packed.items()}
        self._replace(products)

    def _replace(self, products: dict[str, NativeProduct]) -> None:
        """Put native parts in the places of PyTorch's; key a product's path."""
        for path, module in list(self.named_modules()):
            if _is_native_mlp(module):
                parts = [products.pop(f"{path}.{part}") for part in _MLP_PARTS]
                is_gelu = module.activation == "gelu_tanh"
                self.set_submodule(path, NativeMLP(*parts, is_gelu=is_gelu, kernels=self.kernels))
            elif isinstance(module, RecurrentMixer):
                module.native = NativeMixer(module, self.kernels)
        self.lm_head = products.pop(_HEAD)
        for path, product in products.items():
            self.set_submodule(path, product)

    def _sites(self) -> Iterator[tuple[str, _Site]]:
        """Yield the products and their paths; of an MLP that is one operator, its parts' paths."""
        mlps = {path: module for path, module in self.named_modules() if _is_native_mlp(module)}
        for path, mlp in mlps.items():
            has_bias = mlp.down_proj.bias is not None
            for part in _MLP_PARTS:
                yield f"{path}.{part}", _Site((f"model.{path}.{part}",), has_bias)
        for path, module in self.named_modules():
            if not isinstance(module, Linear) or module.weight.shape[1] % TILE_DEPTH:
                continue
            parent, _, own = path.rpartition(".")
            if parent in mlps:
                continue
            has_bias = module.bias is not None
            if path == _HEAD:
                yield path, _Site((_HEAD,), has_bias, torch.float32)
            elif isinstance(module, FusedLinear):
                names = tuple(f"model.{parent}.{part}" for part in module.parts)
                yield path, _Site(names, has_bias, self._dtype_of(parent, own))
            else:
                yield path, _Site((f"model.{path}",), has_bias, self._dtype_of(parent, own))

    def _dtype_of(self, parent: str, name: str) -> torch.dtype:
        """Return the dtype of a product's results: native mixers take their rows unrounded."""
        is_of_mixer = isinstance(self.get_submodule(parent), RecurrentMixer)
        return torch.float32 if is_of_mixer and name == "in_proj" else DTYPE

    def _product(self, site: _Site, own: dict[str, Weight]) -> NativeProduct:
        weight = join([own[f"{name}.weight"] for name in site.names])
        bias: torch.Tensor | None = None
        if site.has_bias:
            bias = torch.cat([plain(own[f"{name}.bias"]) for name in site.names])
        return NativeProduct(weight, bias, site.dtype, self.kernels)


def _is_native_mlp(module: nn.Module) -> TypeGuard[MLP]:
    """Whether an MLP is one native operator."""
    if not isinstance(module, MLP) or module.gate_scale != 1.0:
        return False
    sizes = module.down_proj.weight.shape
    return module.activation in ("silu", "gelu_tanh") and all(size % PANEL == 0 for size in sizes)


def _num_bytes(weight: Weight) -> int:
    if isinstance(weight, torch.Tensor):
        return weight.numel() * DTYPE.itemsize
    return weight.num_bytes(DTYPE)
