"""The records of mixers of tokens: attention, and recurrences."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from legato.core.errors import UnsupportedModelError
from legato.core.validation import Count, Scale, Size
from legato.model.latent import LatentAttentionSpec
from legato.model.model import LayerCache
from legato.model.states import StateShape


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Grouped-query attention.

    Attributes:
        latent: how queries and keys are made if keys are latents, which are their own values; None
            if queries, keys and values are projected. The only key/value head is the latents'.
        scale: factor on the query-key products.
        rope: which of the decoder's ropes turns queries and keys.
        window: keys visible to a query; None if all are.
        is_chunked: the window is a chunk: a query sees the keys from the last multiple of its width
            on, not the last ones.
        qk_norm: queries and keys are RMS-normalized, each head, each head without weights, or all
            heads as one row; None if they are not.
        norm_after_rope: they are normalized after rope rather than before.
        softcap: largest scaled query-key product c; it becomes c * tanh(product / c).
        has_sinks: the softmax of each query head has one more score, which is learned and has no
            value (Xiao et al., 2024, arXiv:2309.17453).
        qkv_bias: the query, key and value projections have biases.
        output_bias: the output projection has a bias.
        has_gate: the output of each head is multiplied by the sigmoid of a further projection.
        has_value_norm: values are RMS-normalized, each head, without weights.
        value_is_key: there is no value projection: values are the keys before norm and rope.
        kv_from: index of the earlier layer whose keys and values it reads; None if it has its own.

    Raises:
        UnsupportedModelError: query heads do not divide evenly among key/value heads.
    """

    latent: LatentAttentionSpec | None = None
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    scale: Scale
    rope: Annotated[int, msgspec.Meta(ge=0)] = 0
    window: Size | None = None
    is_chunked: bool = False
    qk_norm: Literal["head", "plain_head", "whole"] | None = None
    norm_after_rope: bool = False
    softcap: Scale | None = None
    has_sinks: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    has_gate: bool = False
    has_value_norm: bool = False
    value_is_key: bool = False
    kv_from: Annotated[int, msgspec.Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads"
            )

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def rope_size(self) -> int:
        """Dimensions of a head that a rope has angles for."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def key_size(self) -> int:
        """Outputs of its key projection; 0 without one."""
        return self.kv_size if self.kv_from is None else 0

    @property
    def value_size(self) -> int:
        """Outputs of its value projection; 0 without one."""
        return 0 if self.value_is_key else self.key_size

    @property
    def cached(self) -> LayerCache:
        """What the cache has of each token, for the layer itself or for the one that it reads."""
        return LayerCache(self.num_kv_heads, self.head_dim, self.window)


RowParts = Mapping[str, tuple[int, ...]]
"""Key a module or a vector of a mixer, value the sizes of its rows' adjacent parts. A rank has some
rows of each part. A module without an entry has the same rows on all ranks."""


class ShortConvSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A gated convolution over the last few positions: `c * conv(b * x)`.

    Attributes:
        num_channels: of the convolution.
        kernel_size: positions that a convolution reads, its own included.
        has_bias: the convolution and the projections have biases.
    """

    num_channels: Size
    kernel_size: Annotated[int, msgspec.Meta(ge=2, le=64)]
    has_bias: bool = False

    def __str__(self) -> str:
        return f"{self.num_channels} channels of short convolutions"

    @property
    def state(self) -> StateShape:
        """The shape of a request's state."""
        return StateShape(num_inputs=self.kernel_size - 1, num_channels=self.num_channels)

    @property
    def row_parts(self) -> RowParts:
        return {"in_proj": (self.num_channels,) * 3, "conv": (self.num_channels,)}

    def num_weights(self, hidden_size: int) -> int:
        """Return the size of the projections."""
        return 4 * hidden_size * self.num_channels

    def can_be_divided(self, num_ranks: int) -> bool:
        """Whether each rank gets as many channels."""
        return self.num_channels % num_ranks == 0

    def part(self, num_ranks: int) -> "ShortConvSpec":
        """Return the record of each rank's channels."""
        return msgspec.structs.replace(self, num_channels=self.num_channels // num_ranks)


class DeltaNetSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Gated delta net.

    Attributes:
        num_heads: of values, and of the state.
        num_key_heads: of queries and of keys.
        key_dim, value_dim: sizes of a head's key and value.
        kernel_size: positions that the convolution of queries, keys and values reads.

    Raises:
        UnsupportedModelError: the heads do not divide evenly among those of keys.
    """

    num_heads: Size
    num_key_heads: Size
    key_dim: Size
    value_dim: Size
    kernel_size: Annotated[int, msgspec.Meta(ge=2, le=64)] = 4

    def __post_init__(self) -> None:
        if self.num_heads % self.num_key_heads:
            raise UnsupportedModelError(
                f"{self.num_heads} value heads cannot share {self.num_key_heads} key heads"
            )

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    def __str__(self) -> str:
        return f"{self.num_key_heads} key heads of delta nets"

    @property
    def projections(self) -> dict[str, int]:
        """Sizes of the projections' outputs; key the name."""
        return {
            "in_proj_q": self.key_size,
            "in_proj_k": self.key_size,
            "in_proj_v": self.value_size,
            "in_proj_z": self.value_size,
            "in_proj_b": self.num_heads,
            "in_proj_a": self.num_heads,
        }

    @property
    def state(self) -> StateShape:
        """The shape of a request's state."""
        return StateShape(
            num_inputs=self.kernel_size - 1,
            num_channels=self.num_channels,
            recurrent=(self.num_heads, self.key_dim, self.value_dim),
        )

    @property
    def row_parts(self) -> RowParts:
        return {
            **{name: (size,) for name, size in self.projections.items()},
            "conv": (self.key_size, self.key_size, self.value_size),
            "A_log": (self.num_heads,),
            "dt_bias": (self.num_heads,),
        }

    def num_weights(self, hidden_size: int) -> int:
        """Return the size of the projections."""
        return hidden_size * (self.num_channels + 2 * self.value_size + 2 * self.num_heads)

    def can_be_divided(self, num_ranks: int) -> bool:
        """Whether each rank gets as many heads of keys, with their heads of values."""
        return self.num_key_heads % num_ranks == 0

    def part(self, num_ranks: int) -> "DeltaNetSpec":
        """Return the record of each rank's heads."""
        return msgspec.structs.replace(
            self,
            num_heads=self.num_heads // num_ranks,
            num_key_heads=self.num_key_heads // num_ranks,
        )


class Mamba2Spec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Mamba-2.

    Attributes:
        num_groups: of heads; the heads of one share their vectors B and C.
        head_dim: size of a head's input and output.
        state_size: numbers of the state for each of them.
        kernel_size: positions that the convolution of inputs, B and C reads.
        has_conv_bias, has_bias: the convolution, or the projections, have biases.
        shortest_step, longest_step: limits of dt; None for none.
        norm: of the outputs, after they are multiplied with their gates or before; None for none.
        scales: factors on the projected gates, inputs, B, C and steps.
        num_group_ranks: ranks that share a group; several only in a rank's part of a decoder.

    Raises:
        UnsupportedModelError: the heads do not divide evenly among the groups.
    """

    num_heads: Size
    num_groups: Size
    head_dim: Size
    state_size: Size
    kernel_size: Annotated[int, msgspec.Meta(ge=2, le=64)] = 4
    has_conv_bias: bool = True
    has_bias: bool = False
    shortest_step: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    longest_step: Scale | None = None
    norm: Literal["after_gate", "before_gate"] | None = "after_gate"
    scales: tuple[Scale, Scale, Scale, Scale, Scale] = (1.0,) * 5
    num_group_ranks: Count = 1

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise UnsupportedModelError(
                f"{self.num_heads} heads cannot be divided into {self.num_groups} groups"
            )

    def __str__(self) -> str:
        return f"{self.num_groups} x {self.num_heads // self.num_groups} heads of Mamba-2"

    @property
    def has_shared_norm(self) -> bool:
        """Whether the norm of a group is computed by several ranks together."""
        return self.norm is not None and self.num_group_ranks > 1

    @property
    def size(self) -> int:
        """Size of all heads' inputs."""
        return self.num_heads * self.head_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: inputs, B and C."""
        return self.size + 2 * self.num_groups * self.state_size

    @property
    def parts(self) -> tuple[int, int, int, int, int]:
        """Sizes of the projected gates, inputs, B, C and steps."""
        size, shared = self.size, self.num_groups * self.state_size
        return size, size, shared, shared, self.num_heads

    @property
    def state(self) -> StateShape:
        """The shape of a request's state."""
        return StateShape(
            num_inputs=self.kernel_size - 1,
            num_channels=self.num_channels,
            recurrent=(self.num_heads, self.head_dim, self.state_size),
        )

    @property
    def row_parts(self) -> RowParts:
        heads = (self.num_heads,)
        return {
            "in_proj": self.parts,
            "conv": self.parts[1:4],
            "A_log": heads,
            "D": heads,
            "dt_bias": heads,
            "norm": (self.size,),
        }

    def num_weights(self, hidden_size: int) -> int:
        """Return the size of the projections."""
        return hidden_size * (2 * self.size + self.num_channels + self.num_heads)

    def can_be_divided(self, num_ranks: int) -> bool:
        """Whether each rank gets as many heads: of whole groups, or all of one group."""
        is_even = self.num_groups % num_ranks == 0 or num_ranks % self.num_groups == 0
        return is_even and self.num_heads % num_ranks == 0

    def part(self, num_ranks: int) -> "Mamba2Spec":
        """Return the record of each rank's heads.

        If there are fewer groups than ranks, ranks have the same B and C, and parts of a norm.
        """
        return msgspec.structs.replace(
            self,
            num_heads=self.num_heads // num_ranks,
            num_groups=max(1, self.num_groups // num_ranks),
            num_group_ranks=max(1, num_ranks // self.num_groups),
        )


RecurrenceSpec = ShortConvSpec | DeltaNetSpec | Mamba2Spec
