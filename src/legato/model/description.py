"""A checkpoint's description of its decoder, as in transformers' config.json. Torch-free.

transformers' own configurations are not used: to import one takes longer than to load the default
model.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from legato.core.errors import UnsupportedModelError

_STRETCHED_TYPES = ("llama3", "yarn", "longrope")
"""Rope types that depend on the model's context length before it was stretched."""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that Legato reads, with defaults for missing ones.

    Attributes:
        rope_scaling: the name of `rope_parameters` in older checkpoints.
        rope_theta, partial_rotary_factor, original_max_position_embeddings: used if the rope
            parameters lack them.
        dtype, torch_dtype: the new name and the old one.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float = 10000.0
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: float | None = None
    dtype: Any = None
    torch_dtype: Any = None

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rope(self) -> dict[str, Any]:
        """All rope parameters, including the type.

        Raises:
            UnsupportedModelError: layers have parameters of their own.
        """
        own = self.rope_scaling or self.rope_parameters or {}
        if any(isinstance(value, Mapping) for value in own.values()):
            raise UnsupportedModelError("rope parameters of each kind of layer are not supported")
        rope = {"rope_theta": self.rope_theta, "rope_type": own.get("type", "default"), **own}
        if self.partial_rotary_factor is not None:
            rope.setdefault("partial_rotary_factor", self.partial_rotary_factor)
        if rope["rope_type"] in _STRETCHED_TYPES:
            rope.setdefault("original_max_position_embeddings", self.max_position_embeddings)
            if self.original_max_position_embeddings is not None:
                rope["original_max_position_embeddings"] = self.original_max_position_embeddings
        return rope

    def windows(self, window: int | None, *, num_full: int) -> tuple[int | None, ...]:
        """Return the sliding window of each layer, None for layers with full attention.

        Args:
            window: of the layers with one.
            num_full: number of first layers without one, used if `layer_types` is missing.

        Raises:
            UnsupportedModelError: a layer of a type other than full or sliding attention.
        """
        types = self.layer_types
        if types is None:
            return tuple(window if i >= num_full else None for i in range(self.num_hidden_layers))
        if len(types) != self.num_hidden_layers:
            raise UnsupportedModelError(
                f"layer_types has {len(types)} entries for {self.num_hidden_layers} layers"
            )
        for layer_type in types:
            if layer_type not in ("full_attention", "sliding_attention"):
                raise UnsupportedModelError(f"unsupported layer type {layer_type!r}")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
