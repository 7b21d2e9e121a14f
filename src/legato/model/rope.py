"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) on packed rows.

Half-rotation convention, as in transformers: dimension i is rotated together with i + D / 2.
"""

import math
from typing import Annotated, NamedTuple

import msgspec
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from legato.core.errors import UnsupportedModelError
from legato.model.validation import check_fields

_SCALED_TYPES = ("linear", "llama3", "yarn", "longrope")


_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class _Parameters(msgspec.Struct, frozen=True):
    """What a configuration may say, under transformers' names; each type reads a part of it.

    Raises:
        UnsupportedModelError: a value is of another type, or one that no model has.
    """

    rope_theta: Annotated[float, msgspec.Meta(gt=1, le=1e12)]
    factor: Annotated[float, msgspec.Meta(ge=1, le=1e6)] | None = None
    attention_factor: Annotated[float, msgspec.Meta(gt=0, le=1e3)] | None = None
    original_max_position_embeddings: Annotated[float, msgspec.Meta(ge=1, le=2**31)] | None = None
    beta_fast: _Positive | None = None
    beta_slow: _Positive | None = None
    mscale: Annotated[float, msgspec.Meta(ge=0, le=1e3)] | None = None
    mscale_all_dim: Annotated[float, msgspec.Meta(ge=0, le=1e3)] | None = None
    low_freq_factor: _Positive | None = None
    high_freq_factor: _Positive | None = None
    short_factor: list[_Positive] | None = None
    long_factor: list[_Positive] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
            smaller, larger = getattr(self, low), getattr(self, high)
            if smaller is not None and larger is not None and smaller >= larger:
                raise UnsupportedModelError(f"{low} is {smaller}, but {high} is {larger}")


class RopeFrequencies(NamedTuple):
    """How fast each pair of dimensions turns.

    Attributes:
        inverse: D / 2 angles in radians a position, exact in float32.
        scaling: factor on the cosines and sines (YaRN's temperature; 1 for other types).
    """

    inverse: tuple[float, ...]
    scaling: float


def rope_frequencies(config: PreTrainedConfig, head_dim: int) -> RopeFrequencies:
    """Work out the frequencies of a model, whatever its context was stretched with.

    Raises:
        UnsupportedModelError: rope of a type that Legato does not know, or whose frequencies
            depend on the length of the sequence; or parameters that no model has.
    """
    parameters = config.rope_parameters
    _Parameters(**{n: parameters[n] for n in _Parameters.__struct_fields__ if n in parameters})
    rope_type = parameters.get("rope_type", "default")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("rope on only a part of each head is not supported")
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inverse, scaling = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    elif rope_type not in _SCALED_TYPES:
        raise UnsupportedModelError(
            f"unsupported rope type {rope_type!r}; Legato supports default, "
            + ", ".join(_SCALED_TYPES)
        )
    elif rope_type == "longrope" and parameters["short_factor"] != parameters["long_factor"]:
        raise UnsupportedModelError(
            "rope type 'longrope' is supported only where its short and long factors are the same: "
            "otherwise cached keys would change as a sequence grows"
        )
    else:
        inverse, scaling = ROPE_INIT_FUNCTIONS[rope_type](config)
    if not all(0 < angle < math.inf for angle in inverse.tolist()):
        raise UnsupportedModelError(f"rope parameters {parameters} make no frequencies")
    return RopeFrequencies(tuple(inverse.tolist()), float(scaling))


class RotaryEmbedding(nn.Module):
    """Cosines and sines for the rows of one step."""

    def __init__(self, frequencies: RopeFrequencies, device: torch.device) -> None:
        super().__init__()
        self.scaling = frequencies.scaling
        inverse = torch.tensor(frequencies.inverse, dtype=torch.float32, device=device)
        self.register_buffer("inverse", inverse, persistent=False)  # [D / 2]
        self.inverse: torch.Tensor

    def forward(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute in float32, round to `dtype`.

        Args:
            positions: [T] int64.

        Returns:
            Cosines and sines, [T, 1, D] each; the first half of the sines is negated, as `rotate`
            wants it.
        """
        angles = positions.to(torch.float32)[:, None] * self.inverse  # [T, D / 2]
        cos, sin = angles.cos(), angles.sin()
        if self.scaling != 1.0:
            cos, sin = cos * self.scaling, sin * self.scaling
        cos = torch.cat((cos, cos), dim=-1)
        sin = torch.cat((-sin, sin), dim=-1)
        return cos.to(dtype)[:, None], sin.to(dtype)[:, None]


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each head by its row's angles.

    Args:
        heads: [T, N, D], any number N of heads.
        cos, sin: [T, 1, D] from `RotaryEmbedding`.

    Returns:
        [T, N, D].
    """
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return (heads * cos).add_(swapped.mul_(sin))
