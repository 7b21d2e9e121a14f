"""A decoder whose layers run in one native call, on x86-64 CPUs.

It supports the decoders that `native_support.py` lists and rejects all others. The Python layers
remain the description of the architecture, and the fallback.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F

from legato.core.errors import UnsupportedModelError
from legato.model.communicator import ALONE, Communicator
from legato.model.decoder import LayerInputs, TokenEmbedding, finished_logits, scaled_embeddings
from legato.model.model import LayerWatch, NamedWeights, StepAttention
from legato.model.native_attention import NativeStep, ReadsNativeCache
from legato.model.native_experts import expert_numbers
from legato.model.native_kernels import NativeKernels
from legato.model.native_operators import NativeLinear, NativeNorm
from legato.model.native_support import why_not_computed
from legato.model.native_weights import (
    DTYPE,
    Weight,
    addresses_of,
    as_computed,
    num_parts,
    take_parts,
    weight_bytes,
)
from legato.model.packing import PackingThreads
from legato.model.quantization import copy_plain, plain
from legato.model.rope import RotaryEmbedding, RotaryTurns
from legato.model.spec import LAYER_INPUTS_TABLE, DecoderSpec, LayerInputsSpec
from legato.model.states import StepStates

_EMBEDDING = "model.embed_tokens.weight"
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


class NativeModel(ReadsNativeCache):
    """A `Model` in bfloat16 with native layers and output projection.

    The residual stream is float32, as in the Python layers. Divided among ranks, the model runs in
    halves of layers, with parts that are summed in float32. Embeddings for each layer are made
    before the layers run, on PyTorch's operators but for their projection.

    Args:
        spec: of the whole decoder.
        kernels: to run on.
        communicator: to the other ranks.

    Attributes:
        spec: of this rank's part.

    Raises:
        ConfigError: the decoder cannot be divided among so many ranks.
        UnsupportedModelError: the layers cannot compute this decoder.
    """

    dtype = DTYPE
    sum_dtype = torch.float32
    device = torch.device("cpu")
    num_torch_threads = 1
    """PyTorch's own threads spin for milliseconds after each operation, on the cores that the
    kernels' threads need next."""

    def __init__(
        self, spec: DecoderSpec, kernels: NativeKernels, communicator: Communicator = ALONE
    ) -> None:
        spec = spec.part(communicator.size)
        reason = why_not_computed(spec)
        if reason:
            raise UnsupportedModelError(f"native layers cannot run this model: {reason}")
        empty = partial(torch.empty, dtype=self.dtype)
        self.spec = spec
        self.kernels = kernels
        self.rows = kernels.rows
        self.cache = spec.cache(self.dtype)
        self.num_weight_bytes = 0
        self._communicator = communicator
        self._embed_tokens = TokenEmbedding(spec.vocab_size, spec.hidden_size, empty, communicator)
        self._rotaries = [RotaryEmbedding(rope, self.device) for rope in spec.ropes]
        self._layer_inputs: LayerInputs | None = None
        self._cache_layers = [spec.cache_layer(layer) for layer in range(spec.num_layers)]
        # Key a layer, value the weights of the norms after its attention and its MLP.
        self._output_norms: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        self._norm = NativeNorm(torch.empty(spec.hidden_size), spec.norm_eps, kernels)

    @property
    def num_heads(self) -> int:
        return self.spec.num_heads

    @property
    def drops_rows(self) -> bool:
        """As in `Decoder`."""
        return self._communicator.size == 1

    @property
    def num_part_tokens(self) -> int:
        """As in `Decoder`."""
        return len(self._embed_tokens.weight)

    @torch.inference_mode()
    def load_weights(self, weights: NamedWeights) -> None:
        """Load weights, and keep quantized ones so, except the embedding and mixed matrices.

        A mixed matrix has parts that are not quantized. A layer is packed once all of it is read,
        while later layers are read: at most one for each thread, and one more.
        """
        num_bytes, head = 0, _EMBEDDING if self.spec.tie_word_embeddings else "lm_head.weight"
        packed: Counter[int] = Counter()
        others: dict[str, Weight] = {}
        unpacked: defaultdict[int, dict[str, Weight]] = defaultdict(dict)  # key the layer
        with PackingThreads(self.kernels.num_threads) as threads:
            layers: dict[int, Future[object]] = {}
            for name, found in weights:
                weight = as_computed(name, found)
                num_bytes += weight_bytes(weight) if self.spec.reads_every_step(name) else 0
                if most := self.kernels.most_packed(weight):
                    packed[most] += weight_bytes(weight)
                if name == _EMBEDDING:
                    copy_plain(weight, self._embed_tokens.weight)
                if name == head:
                    packed_head = threads.pack(NativeLinear, weight, self.kernels)
                match = _OF_LAYER.fullmatch(name)
                if match is None:
                    others[name] = weight
                    continue
                layer, own = int(match[1]), unpacked[int(match[1])]
                own[match[2]] = weight
                if len(own) == num_parts(self.spec, layer):
                    layers[layer] = threads.pack(self._make_layer, layer, unpacked.pop(layer))
            self._norm.weight.copy_(plain(others["model.norm.weight"]))
            if self.spec.layer_inputs is not None:
                self._layer_inputs = self._make_layer_inputs(self.spec.layer_inputs, others)
            self._lm_head = packed_head.result()
            # Kept alive for `_native`, which only points to them.
            self._layers = [layers[index].result() for index in range(self.spec.num_layers)]
        self._native = self.kernels.extension.Layers(self._layers)
        self.num_weight_bytes = num_bytes
        self.rows = self.kernels.rows_with(packed)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        *,
        states: StepStates | None = None,
        num_layers: int | None = None,
        watch: LayerWatch | None = None,
    ) -> torch.Tensor:
        assert isinstance(attention, NativeStep)
        assert states is None, "native layers keep no states"
        assert watch is None or self.drops_rows
        hidden = scaled_embeddings(self._embed_tokens(input_ids), self.spec)
        turns = [rotary(positions, torch.float32) for rotary in self._rotaries]
        # [T, layers, P], kept alive while the layers read it.
        inputs = None if self._layer_inputs is None else self._layer_inputs(input_ids, hidden)
        if self._communicator.size > 1:
            self._add_parts(attention, hidden, turns, inputs, num_layers)
        else:
            hidden = self._add_layers(attention, hidden, turns, inputs, num_layers, watch)
        output: torch.Tensor = self._norm(hidden)
        return output

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return finished_logits(self._communicator.gather(self._lm_head(hidden)), self.spec)

    def _add_layers(
        self,
        attention: NativeStep,
        hidden: torch.Tensor,
        turns: Sequence[RotaryTurns],
        inputs: torch.Tensor | None,
        num_layers: int | None,
        watch: LayerWatch | None,
    ) -> torch.Tensor:
        """Add the layers' output to `hidden` [T, E]; return the rows that were not dropped.

        All layers are one call, unless the watch looks at the clock in between.
        """
        most = self.spec.num_layers
        looks = () if watch is None else watch.looks(most)
        addresses, first = _turn_addresses(turns), 0
        for end in (*looks, num_layers or most):
            self._native.forward(
                self.kernels.pool,
                attention.steps,
                self._caches(attention),
                hidden.data_ptr(),
                len(hidden),
                addresses,
                _address(inputs),
                first,
                end,
            )
            kept = watch.look(end) if watch is not None and end in looks else None
            if kept is not None:
                assert isinstance(kept.attention, NativeStep)
                hidden, attention = hidden[: kept.num_rows], kept.attention
            first = end
        return hidden

    def _add_parts(
        self,
        attention: NativeStep,
        hidden: torch.Tensor,
        turns: Sequence[RotaryTurns],
        inputs: torch.Tensor | None,
        num_layers: int | None,
    ) -> None:
        """Add the layers' output to `hidden` [T, E]; ranks sum each half of a layer."""
        pool, layers = self.kernels.pool, self._native
        rows = hidden.data_ptr(), len(hidden)
        addresses = _turn_addresses(turns)
        for layer, cache in enumerate(islice(self._caches(attention), num_layers)):
            after_attention, after_mlp = self._output_norms[layer]
            step = attention.steps[cache[-1]]
            sums = torch.zeros_like(hidden)
            layers.add_attention(pool, step, layer, cache, *rows, addresses, sums.data_ptr())
            self._add_sum(hidden, sums, layer, after_attention)
            sums.zero_()
            layers.add_mlp(pool, step, layer, *rows, sums.data_ptr())
            self._add_sum(hidden, sums, layer, after_mlp)
            layers.finish(pool, layer, *rows, _address(inputs))

    def _caches(self, attention: NativeStep) -> list[tuple[int, int, int, int]]:
        """Return the cache that each layer reads."""
        return [attention.caches[layer] for layer in self._cache_layers]

    def _add_sum(
        self, hidden: torch.Tensor, part: torch.Tensor, layer: int, norm: torch.Tensor | None
    ) -> None:
        """Add the sum of all ranks' parts of a network's output, after its norm if it has one."""
        output = self._communicator.sum(part)
        if norm is not None:
            output = F.rms_norm(output, norm.shape, norm, self.spec.norm_eps)
        hidden.add_(output, alpha=self.spec.layers[layer].residual_scale)

    def _make_layer_inputs(self, own: LayerInputsSpec, others: dict[str, Weight]) -> LayerInputs:
        """Build the embeddings for each layer of the weights outside layers."""
        prefix = "model.layer_inputs"
        projection = NativeLinear(others[f"{prefix}.projection.weight"], self.kernels)
        empty = partial(torch.empty, dtype=self.dtype)
        made = LayerInputs(own, self.spec, projection, empty, self._communicator)
        copy_plain(others[LAYER_INPUTS_TABLE], made.embed_tokens.weight)
        made.norm.weight.copy_(plain(others[f"{prefix}.norm.weight"]))
        return made

    def _make_layer(self, layer: int, own: dict[str, Weight]) -> object:
        """Build a layer; the extension copies the weights, so none must outlive the call."""
        weights = take_parts(own)
        after_attention, after_mlp = (
            plain(weights[name]).clone() if name in weights else None
            for name in ("attention_output_norm", "mlp_output_norm")
        )
        self._output_norms[layer] = after_attention, after_mlp
        mlp = self.spec.layers[layer].mlp
        assert mlp is not None
        addresses = addresses_of(weights, mlp)
        return self.kernels.extension.Layer(_numbers(self.spec, layer), addresses)


def _numbers(spec: DecoderSpec, index: int) -> dict[str, float]:
    """Return a layer's numbers by the extension's names."""
    layer = spec.layers[index]
    attention, mlp = layer.attention, layer.mlp
    assert attention is not None
    assert mlp is not None
    return {
        "hidden_size": spec.hidden_size,
        **expert_numbers(mlp),
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "input_size": 0 if spec.layer_inputs is None else spec.layer_inputs.size,
        "rope": attention.rope,
        "eps": spec.norm_eps,
        "scale": attention.scale,
        "softcap": attention.softcap or 0.0,
        "residual_scale": layer.residual_scale,
        "is_gelu": mlp.activation == "gelu_tanh",
        "has_whole_norms": attention.qk_norm == "whole",
        "norm_after_rope": attention.norm_after_rope,
        "has_own_keys": attention.kv_from is None,
        "value_is_key": attention.value_is_key,
        "has_value_norm": attention.has_value_norm,
    }


def _turn_addresses(turns: Sequence[RotaryTurns]) -> list[tuple[int, int, int]]:
    """Return the addresses of cosines, sines and factors on queries, 0 for none, of each rope."""
    return [(cos.data_ptr(), sin.data_ptr(), _address(scale)) for cos, sin, scale in turns]


def _address(values: torch.Tensor | None) -> int:
    return 0 if values is None else values.data_ptr()
