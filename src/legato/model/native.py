"""Decoder layers that run in one native call, on x86-64 CPUs.

`NativeLayers` stand in for the `DecoderLayer`s: same rows in, same rows out, with the arithmetic in
an extension module (source in native/), of which there is one for each set of instructions. The
Python layers stay the description of the architecture, and the fallback where no extension was
built or none runs on this processor.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import nn

from legato.model.attention import StepAttention
from legato.model.decoder import Decoder
from legato.model.layers import DecoderLayer
from legato.model.quantization import QuantizedWeight, concatenate
from legato.model.spec import DecoderSpec

try:
    from legato import _processor
except ImportError:  # there was no compiler when this was installed
    _processor = None  # type: ignore[assignment]

_TILE_DEPTH = 32
"""Values in a row of a tile: what every size must be a multiple of."""
_LARGEST_HEAD = 256
_PARTS = {
    "qkv": [f"self_attn.{name}_proj.weight" for name in "qkv"],
    "output": ["self_attn.o_proj.weight"],
    "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "down": ["mlp.down_proj.weight"],
}
"""Key the name that the extension gives a matrix, value those of its parts in checkpoints."""


def native_instructions() -> list[str]:
    """The sets of instructions that kernels were built for and that run here, fastest first."""
    known = [] if _processor is None else _processor.instructions()
    return [name for name in known if find_spec(_module(name))]


def _module(instructions: str) -> str:
    return f"legato._kernels_{instructions}"


class Machine:
    """The kernels for a set of instructions, and the threads that they run on.

    Args:
        instructions: one of `native_instructions()`.
    """

    def __init__(self, num_threads: int, instructions: str) -> None:
        assert instructions in native_instructions(), instructions
        self.num_threads = num_threads
        self.instructions = instructions
        self.kernels: Any = import_module(_module(instructions))
        self.pool = self.kernels.ThreadPool(num_threads)


class NativeStep:
    """A step's packed batch as native layers see it. They attend themselves.

    Args:
        chunks: (first row, number of rows, position of the first, block ids) of each request.
        slots: of each row that is not padding.
        caches: (address of the keys, of the values, sliding window or 0) of each layer.
    """

    def __init__(
        self,
        machine: Machine,
        spec: DecoderSpec,
        block_size: int,
        chunks: Sequence[tuple[int, int, int, list[int]]],
        slots: list[int],
        caches: Sequence[tuple[int, int, int]],
    ) -> None:
        shape = spec.num_kv_heads, spec.head_dim, block_size
        group = spec.num_heads // spec.num_kv_heads
        self.native = machine.kernels.Step(chunks, slots, shape, group, machine.num_threads)
        self.caches = caches

    def attend(self, *_: object, **__: object) -> torch.Tensor:
        raise TypeError("only native layers run on a native cache")


class NativeLayers(nn.Module):
    """All layers of a decoder in one call, their weights laid out for the kernels.

    Args:
        quantized: key a weight's name in checkpoints; taken instead of the decoder's own.
    """

    def __init__(
        self, decoder: Decoder, machine: Machine, quantized: Mapping[str, QuantizedWeight]
    ) -> None:
        super().__init__()
        self._pool = machine.pool
        self._layers = [
            _native_layer(machine, decoder.spec, cast(DecoderLayer, layer), quantized, index)
            for index, layer in enumerate(decoder.layers)
        ]
        self._native = machine.kernels.Layers(self._layers)

    def forward(
        self,
        hidden: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        attention: StepAttention,
    ) -> torch.Tensor:
        """As `DecoderLayer.forward`; `rope` is in float32 and `attention` a `NativeStep`."""
        assert isinstance(attention, NativeStep)
        cos, sin = rope
        self._native.forward(
            self._pool,
            attention.native,
            attention.caches,
            hidden.data_ptr(),
            len(hidden),
            cos.data_ptr(),
            sin.data_ptr(),
        )
        return hidden


def _native_layer(
    machine: Machine,
    spec: DecoderSpec,
    layer: DecoderLayer,
    quantized: Mapping[str, QuantizedWeight],
    index: int,
) -> object:
    """The extension copies the weights, so that nothing here has to outlive the call."""
    sizes = (
        spec.hidden_size,
        spec.intermediate_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
    )
    weights: dict[str, torch.Tensor | QuantizedWeight] = {**_weights(layer)}
    for name, parts in _PARTS.items():
        names = [f"model.layers.{index}.{part}" for part in parts]
        # A matrix of which only a part is quantized is not.
        if all(part in quantized for part in names):
            weights[name] = concatenate([quantized[part] for part in names])
    addresses: dict[str, int] = {}
    for name, weight in weights.items():
        addresses |= _addresses(name, weight)
    return machine.kernels.Layer(sizes, spec.rms_norm_eps, addresses)


def _addresses(name: str, weight: torch.Tensor | QuantizedWeight) -> dict[str, int]:
    """Of the parts of a weight, by the names that the extension gives them."""
    if isinstance(weight, torch.Tensor):
        return {name: weight.data_ptr()}
    return {
        f"{name}.codes": weight.codes.data_ptr(),
        f"{name}.scales": weight.scales.data_ptr(),
        f"{name}.minima": weight.minima.data_ptr(),
        f"{name}.bits": weight.bits,
    }


class NativeLinear(nn.Module):
    """A `Linear` without bias whose outputs are in float32."""

    def __init__(self, weight: torch.Tensor | QuantizedWeight, machine: Machine) -> None:
        super().__init__()
        self._pool = machine.pool
        self._num_outputs, depth = weight.shape
        self._native = machine.kernels.Matrix(
            _addresses("weight", weight), self._num_outputs, depth
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, out] float32."""
        rows = rows.contiguous()
        out = torch.empty(len(rows), self._num_outputs)
        self._native.multiply(self._pool, rows.data_ptr(), len(rows), out.data_ptr())
        return out


def why_not_native(spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> str:
    """What keeps the native layers from running this model; empty where nothing does."""
    if device.type != "cpu":
        return f"the device is {device.type}"
    if _processor is None:
        return "no extension was built, for want of a C++ compiler or of an x86-64 processor"
    if not native_instructions():
        return "the processor has no AVX2, or the compiler knew of no such instructions"
    if dtype != torch.bfloat16:
        return f"the dtype is {str(dtype).removeprefix('torch.')}, not bfloat16"
    sizes = (spec.hidden_size, spec.intermediate_size, spec.head_dim)
    if any(size % _TILE_DEPTH for size in sizes):
        return f"hidden, intermediate or head size of {sizes} is not a multiple of {_TILE_DEPTH}"
    if spec.head_dim > _LARGEST_HEAD:
        return f"the head size {spec.head_dim} is above {_LARGEST_HEAD}"
    return ""


@torch.inference_mode()
def make_native(
    decoder: Decoder, machine: Machine, quantized: Mapping[str, QuantizedWeight] | None = None
) -> None:
    """Replace the layers and the output projection.

    Args:
        quantized: key a weight's name in checkpoints; taken instead of the decoder's own.
    """
    quantized = quantized or {}
    decoder.layers = nn.ModuleList([NativeLayers(decoder, machine, quantized)])
    head = "model.embed_tokens.weight" if decoder.lm_head is None else "lm_head.weight"
    weight = quantized.get(head, decoder.checkpoint_slots()[head])
    decoder.lm_head = NativeLinear(weight, machine)
    decoder.rope_dtype = torch.float32


def _weights(layer: DecoderLayer) -> dict[str, torch.Tensor]:
    """Key the name that the extension gives a weight; contiguous, norms in float32."""
    attention, mlp = layer.self_attn, layer.mlp
    found: dict[str, torch.Tensor | None] = {
        "input_norm": layer.input_layernorm.weight,
        "post_norm": layer.post_attention_layernorm.weight,
        "query_norm": None if attention.q_norm is None else attention.q_norm.weight,
        "key_norm": None if attention.k_norm is None else attention.k_norm.weight,
        "qkv": attention.qkv_proj.weight,
        "qkv_bias": attention.qkv_proj.bias,
        "output": attention.o_proj.weight,
        "output_bias": attention.o_proj.bias,
        "gate_up": mlp.gate_up_proj.weight,
        "gate_up_bias": mlp.gate_up_proj.bias,
        "down": mlp.down_proj.weight,
        "down_bias": mlp.down_proj.bias,
    }
    return {name: weight for name, weight in found.items() if weight is not None}
