"""A decoder whose layers run in one native call, on x86-64 CPUs.

The arithmetic is in an extension module (source in native/), one for each set of instructions. It
supports the decoders that `native_support.py` lists and rejects all others. The Python layers
remain the description of the architecture, and the fallback if no extension was built or none runs
on this processor.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from legato.core.errors import UnsupportedModelError
from legato.core.rows import CPU_ROWS, UNPADDED, RowCounts
from legato.model.base import CacheSpec, LayerWatch, NamedWeights, StepAttention
from legato.model.communicator import ALONE, Communicator
from legato.model.decoder import Embedding, LayerInputs, finished_logits, scaled_embeddings
from legato.model.native_experts import expert_numbers
from legato.model.native_support import why_not_computed, why_not_in_parts
from legato.model.native_weights import (
    DTYPE,
    Weight,
    addresses_of,
    as_computed,
    join,
    num_parts,
    take_parts,
    weight_addresses,
    weight_bytes,
)
from legato.model.quantization import QuantizedWeight, copy_plain, plain
from legato.model.rope import RotaryEmbedding, Turns
from legato.model.spec import LAYER_INPUTS_TABLE, DecoderSpec, LayerInputsSpec
from legato.model.states import StepStates
from legato.model.transformers_spec import TransformersSpec

try:
    from legato import _processor
except ImportError:  # no compiler was available at installation
    _processor = None  # type: ignore[assignment]

_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def native_instructions() -> list[str]:
    """Return the instruction sets that have kernels and run here, fastest first."""
    return [name for name in _runnable() if find_spec(_module(name))]


def emulated_instructions() -> list[str]:
    """Return the built kernels of AVX-512 and AMX in plain C++, for tests only."""
    emulated = ("emulated_avx512", "emulated_amx") if "avx2" in _runnable() else ()
    return [name for name in emulated if find_spec(_module(name))]


def unbuilt_instructions() -> list[str]:
    """Return the instruction sets that would run here, but have no kernels from the compiler."""
    return [name for name in _runnable() if not find_spec(_module(name))]


def _runnable() -> list[str]:
    return [] if _processor is None else _processor.instructions()


def _module(instructions: str) -> str:
    return f"legato._kernels_{instructions}"


class NativeKernels:
    """The kernels of one instruction set, and the threads that run them.

    Args:
        instructions: one of `native_instructions()`, or of `emulated_instructions()`.

    Attributes:
        rows: as of `Model`, where no weights are packed.
    """

    def __init__(self, num_threads: int, instructions: str) -> None:
        assert instructions in (*native_instructions(), *emulated_instructions()), instructions
        self.num_threads = num_threads
        self.instructions = instructions
        self.extension: Any = import_module(_module(instructions))
        self.pool = self.extension.ThreadPool(num_threads)
        self.operators = self.extension.Operators(self.pool)
        self.rows = CPU_ROWS if instructions.endswith("amx") else UNPADDED

    def most_packed(self, weight: Weight) -> int:
        """Return the `RowCounts.most_packed` of products with this weight."""
        if isinstance(weight, torch.Tensor) or weight.is_stored_only:
            return 0
        if weight.is_rotated or weight.is_float8:
            return 0
        return int(self.extension.most_packed(weight.bits, weight.rounds_rows))

    def rows_with(self, packed: Counter[int]) -> RowCounts:
        """Return a model's row counts; key `most_packed` of weights, value bytes of these."""
        most_packed = max(packed, key=packed.__getitem__, default=0)
        return msgspec.structs.replace(self.rows, most_packed=most_packed)


class ReadsNativeCache:
    """A model whose attention reads the native cache.

    Attributes:
        kernels: compute it.
    """

    kernels: NativeKernels

    @property
    def num_heads(self) -> int:
        """Query heads of every layer, of this rank's part."""
        raise NotImplementedError

    def begin_step(
        self,
        cache: CacheSpec,
        block_size: int,
        chunks: Sequence[tuple[int, int, int, list[int]]],
        slots: list[int],
    ) -> object:
        """Return the extension's step for the layers of one cache group.

        Args:
            cache: what these layers keep of each token.
            chunks: (first row, number of rows, position of the first, block ids) of each request.
            slots: of each row, padding excluded.
        """
        shape = cache.num_kv_heads, cache.head_dim, block_size, cache.is_quantized
        group = self.num_heads // cache.num_kv_heads
        return self.kernels.extension.Step(chunks, slots, shape, group, self.kernels.num_threads)


def why_not_native(
    spec: DecoderSpec | TransformersSpec, dtype: torch.dtype, device: torch.device
) -> str:
    """Return why native kernels cannot run this model, or part; empty if they can.

    Of models with recurrent layers, they run most parts of PyTorch's layers.
    """
    if device.type != "cpu":
        return f"the device is {device.type}"
    if _processor is None:
        return "no extension was built, for want of a C++ compiler or of an x86-64 processor"
    if not native_instructions():
        return "the processor has no AVX2, or the compiler knew of no such instructions"
    if dtype != DTYPE:
        return f"the dtype is {str(dtype).removeprefix('torch.')}, not bfloat16"
    if isinstance(spec, TransformersSpec):
        return ""
    return why_not_in_parts(spec) if spec.states else why_not_computed(spec)


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
        self._embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, empty, communicator)
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
        while later layers are read.
        """
        num_bytes = 0
        packed: Counter[int] = Counter()
        others: dict[str, Weight] = {}
        unpacked: defaultdict[int, dict[str, Weight]] = defaultdict(dict)  # key the layer
        with ThreadPoolExecutor(self.kernels.num_threads) as threads:
            layers: dict[int, Future[object]] = {}
            for name, found in weights:
                weight = as_computed(name, found)
                num_bytes += weight_bytes(weight) if self.spec.reads_every_step(name) else 0
                if most := self.kernels.most_packed(weight):
                    packed[most] += weight_bytes(weight)
                match = _OF_LAYER.fullmatch(name)
                if match is None:
                    others[name] = weight
                    continue
                layer, own = int(match[1]), unpacked[int(match[1])]
                own[match[2]] = weight
                if len(own) == num_parts(self.spec, layer):
                    layers[layer] = threads.submit(self._make_layer, layer, unpacked.pop(layer))
            embedding = others["model.embed_tokens.weight"]
            head = embedding if self.spec.tie_word_embeddings else others["lm_head.weight"]
            packed_head = threads.submit(NativeLinear, head, self.kernels)
            copy_plain(embedding, self._embed_tokens.weight)
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
        attention: "NativeStep",
        hidden: torch.Tensor,
        turns: Sequence[Turns],
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
        attention: "NativeStep",
        hidden: torch.Tensor,
        turns: Sequence[Turns],
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

    def _caches(self, attention: "NativeStep") -> list[tuple[int, int, int, int]]:
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


class NativeStep:
    """A step's packed batch for native layers, or for attention on native kernels alone.

    Args:
        steps: the extension's step of each cache group.
        caches: (address of the keys, address of the values, sliding window or 0, index of the
            group) of each layer.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        steps: Sequence[object],
        caches: Sequence[tuple[int, int, int, int]],
    ) -> None:
        self._kernels = kernels
        self.steps = steps
        self.caches = caches

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if sinks is not None:
            raise TypeError("native attention without native layers has no sinks")
        if key is None or value is None:
            raise TypeError("native attention without native layers writes keys and values")
        cache = self.caches[layer]
        assert cache[2] == (sliding_window or 0)
        out = query.new_empty(query.shape)
        self._kernels.operators.attend(
            self.steps[cache[-1]],
            cache,
            len(query),
            *map(_heads, (query, key, value)),
            scale,
            softcap or 0.0,
            out.data_ptr(),
        )
        return out


def _heads(rows: torch.Tensor) -> tuple[int, int, int]:
    """Return the address of heads [T, heads, D], and their strides."""
    assert rows.dtype == DTYPE
    assert rows.stride(2) == 1
    return rows.data_ptr(), rows.stride(0), rows.stride(1)


class NativeNorm(nn.Module):
    """An RMS norm of the last dimension. Attributes: weight: float32 [E], a multiple of 16."""

    def __init__(self, weight: torch.Tensor, eps: float, kernels: NativeKernels) -> None:
        super().__init__()
        self.weight, self._eps = weight, eps
        self._operators = kernels.operators

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Normalize rows of bfloat16 or float32 to bfloat16, same shape."""
        rows = rows.contiguous()
        out = torch.empty(rows.shape, dtype=DTYPE)
        size = len(self.weight)
        self._operators.normalize(
            rows.data_ptr(),
            rows.dtype == DTYPE,
            rows.numel() // size,
            size,
            self.weight.data_ptr(),
            self._eps,
            out.data_ptr(),
        )
        return out


class NativeLinear:
    """A projection without bias and with float32 outputs. Attributes: native: the packed matrix."""

    def __init__(self, weight: torch.Tensor | QuantizedWeight, kernels: NativeKernels) -> None:
        self._pool = kernels.pool
        self._num_outputs, depth = weight.shape
        packed = join([weight])
        self.native = kernels.extension.Matrix(
            weight_addresses("weight", packed), self._num_outputs, depth
        )

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [T, in] to [T, out] float32."""
        rows = rows.contiguous()
        out = torch.empty(len(rows), self._num_outputs)
        self.native.multiply(self._pool, rows.data_ptr(), len(rows), out.data_ptr())
        return out


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


def _turn_addresses(turns: Sequence[Turns]) -> list[tuple[int, int, int]]:
    """Return the addresses of cosines, sines and factors on queries, 0 for none, of each rope."""
    return [(cos.data_ptr(), sin.data_ptr(), _address(scale)) for cos, sin, scale in turns]


def _address(values: torch.Tensor | None) -> int:
    return 0 if values is None else values.data_ptr()
