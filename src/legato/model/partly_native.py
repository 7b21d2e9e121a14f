"""A decoder on PyTorch's layers, whose products, attention and recurrent mixers are native.

Models with recurrent layers run so: native layers in one call do not know their mixers. What is
left to PyTorch is small: norms, rope, gates of heads and sums; and experts that native layers do
not compute.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

from legato.model.communicator import ALONE, Communicator
from legato.model.decoder import Decoder
from legato.model.experts import MixtureOfExperts
from legato.model.linear import FusedLinear, Linear
from legato.model.mlp import MLP
from legato.model.mlp_spec import MoeSpec
from legato.model.model import NamedWeights
from legato.model.native_attention import ReadsNativeCache
from legato.model.native_experts import num_expert_weights
from legato.model.native_kernels import NativeKernels
from legato.model.native_operators import (
    NativeMixture,
    NativeMLP,
    NativeProduct,
    pack_experts,
)
from legato.model.native_recurrence import NativeMixer
from legato.model.native_support import TILE_DEPTH, why_not_experts
from legato.model.native_weights import DTYPE, PANEL, Weight, as_computed, join
from legato.model.packing import PackingThreads
from legato.model.quantization import copy_plain, plain
from legato.model.recurrence import RecurrentMixer
from legato.model.spec import DecoderSpec

logger = logging.getLogger(__name__)

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

    @property
    def num_weights(self) -> int:
        return len(self.names) * (1 + self.has_bias)

    def pack(self, own: dict[str, Weight], kernels: NativeKernels) -> NativeProduct:
        weight = join([own[f"{name}.weight"] for name in self.names])
        bias: torch.Tensor | None = None
        if self.has_bias:
            bias = torch.cat([plain(own[f"{name}.bias"]) for name in self.names])
        return NativeProduct(weight, bias, self.dtype, kernels)


class _ExpertsSite(NamedTuple):
    """A mixture that becomes a `NativeMixture`, without its MLP for all rows.

    Attributes:
        layer: its layer's prefix of names in checkpoints.
    """

    layer: str
    moe: MoeSpec
    hidden_size: int

    @property
    def names(self) -> tuple[str, ...]:
        """Of its parts in checkpoints, as a `_Site` has them."""
        experts = (
            f"experts.{i}.{part}" for i in range(self.moe.num_experts) for part in _MLP_PARTS
        )
        return tuple(f"{self.layer}mlp.{name}" for name in ("gate", "shared_expert_gate", *experts))

    @property
    def num_weights(self) -> int:
        return num_expert_weights(self.moe)

    def pack(self, own: dict[str, Weight], kernels: NativeKernels) -> Any:
        """Return the extension's experts."""
        weights = {name.removeprefix(self.layer): as_computed(name, own[name]) for name in own}
        own.clear()  # so that a matrix is freed once it is joined with others
        return pack_experts(self.moe, self.hidden_size, weights, kernels)


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
        reason = why_not_experts(self.spec)
        if reason and communicator.rank == 0:
            logger.info("PyTorch computes the experts, more slowly than native kernels: %s", reason)
        self._has_native_experts = not reason
        # As in `NativeModel`, PyTorch's threads would spin on the cores of the kernels' threads,
        # unless experts are products of PyTorch's.
        self.num_torch_threads = None if reason else 1

    @property
    def num_heads(self) -> int:
        return self.spec.num_heads

    @torch.inference_mode()
    def load_weights(self, weights: NamedWeights) -> None:
        """Load weights, and keep quantized ones of products so, except mixed matrices.

        A product, or a layer's experts, are packed once all parts are read, while later ones are
        read: at most one for each thread, and one more.
        """
        slots = self.checkpoint_slots()
        sites: dict[str, _Site | _ExpertsSite] = {**dict(self._sites()), **self._experts_sites()}
        site_of = {part: path for path, site in sites.items() for part in site.names}
        unpacked: dict[str, dict[str, Weight]] = {}  # key the site's path
        stay_packed: Counter[int] = Counter()
        self.num_weight_bytes = 0
        with PackingThreads(self.kernels.num_threads) as threads:
            packed: dict[str, Future[Any]] = {}
            for name, weight in weights:
                if self.spec.reads_every_step(name):
                    self.num_weight_bytes += _num_bytes(weight)
                path = site_of.get(name.rpartition(".")[0])
                if path is None:
                    copy_plain(weight, slots[name])
                else:
                    if most := self.kernels.most_packed(weight):
                        stay_packed[most] += _num_bytes(weight)
                    own, site = unpacked.setdefault(path, {}), sites[path]
                    own[name] = weight
                    if len(own) == site.num_weights:
                        packed[path] = threads.pack(site.pack, unpacked.pop(path), self.kernels)
                if name == _EMBEDDING and self.spec.tie_word_embeddings:
                    head = partial(NativeProduct, weight, None, torch.float32, self.kernels)
                    packed[_HEAD] = threads.pack(head)
            parts = {path: part.result() for path, part in packed.items()}
        self._replace(parts)
        self.rows = self.kernels.rows_with(stay_packed)

    def _replace(self, packed: dict[str, Any]) -> None:
        """Put native parts in the places of PyTorch's; key the path of a product or of experts."""
        experts = {path: packed.pop(path) for path in self._experts_sites()}
        for path, module in list(self.named_modules()):
            if _is_native_mlp(module):
                parts = [packed.pop(f"{path}.{part}") for part in _MLP_PARTS]
                is_gelu = module.activation == "gelu_tanh"
                self.set_submodule(path, NativeMLP(*parts, is_gelu=is_gelu, kernels=self.kernels))
            elif isinstance(module, RecurrentMixer):
                module.native = NativeMixer(module, self.kernels)
        self.lm_head = packed.pop(_HEAD)
        for path, product in packed.items():
            self.set_submodule(path, product)
        for path, own in experts.items():
            mixture = self.get_submodule(path)
            assert isinstance(mixture, MixtureOfExperts)
            self.set_submodule(path, NativeMixture(own, mixture.shared_expert, self.kernels))

    def _experts_sites(self) -> dict[str, _ExpertsSite]:
        """Return the mixtures that become native; key the path."""
        if not self._has_native_experts:
            return {}
        return {
            f"layers.{index}.mlp": _ExpertsSite(
                f"model.layers.{index}.", layer.mlp, self.spec.hidden_size
            )
            for index, layer in enumerate(self.spec.layers)
            if isinstance(layer.mlp, MoeSpec)
        }

    def _sites(self) -> Iterator[tuple[str, _Site]]:
        """Yield the products and their paths; of an MLP that is one operator, its parts' paths."""
        mlps = {path: module for path, module in self.named_modules() if _is_native_mlp(module)}
        mixtures = self._experts_sites()
        for path, mlp in mlps.items():
            has_bias = mlp.down_proj.bias is not None
            for part in _MLP_PARTS:
                yield f"{path}.{part}", _Site((f"model.{path}.{part}",), has_bias)
        for path, module in self.named_modules():
            if not isinstance(module, Linear) or module.weight.shape[1] % TILE_DEPTH:
                continue
            parent, _, own = path.rpartition(".")
            if parent in mlps or parent in mixtures:
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
