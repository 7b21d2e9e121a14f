"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) on packed rows.

Half-rotation convention, as in transformers: dimension i rotates together with i + D / 2. If a
model has another convention, its projections' rows are reordered at load (`rotary_order`), and
dimensions that do not rotate have angles of zero.
"""

import math
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from torch import nn

from legato.core.errors import UnsupportedModelError
from legato.core.validation import check_fields

_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
_BETA_FAST, _BETA_SLOW = 32, 1
"""YaRN's defaults, for models of Llama's kind."""


class _Parameters(msgspec.Struct, frozen=True):
    """Parameters of a configuration, under transformers' names; each rope type reads some of them.

    Raises:
        UnsupportedModelError: a value has another type or an impossible value.
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
    truncate: bool = True
    partial_rotary_factor: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    alpha: _Positive | None = None
    llama_4_scaling_beta: Annotated[float, msgspec.Meta(ge=0, le=1e3)] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
            smaller, larger = getattr(self, low), getattr(self, high)
            if smaller is not None and larger is not None and smaller >= larger:
                raise UnsupportedModelError(f"{low} is {smaller}, but {high} is {larger}")

    def needed(self, name: str) -> float:
        """Return a parameter that the rope type requires."""
        value: float | None = getattr(self, name)
        if value is None:
            raise UnsupportedModelError(f"the rope parameters lack {name}")
        return value

    def stretching(self, max_model_len: int) -> float:
        """Return the context length as a multiple of the length in training."""
        if self.factor is not None:
            return self.factor
        return max_model_len / self.needed("original_max_position_embeddings")


PARAMETERS = frozenset(_Parameters.__struct_fields__)
"""The names of all rope parameters but the type."""


class QueryGrowth(NamedTuple):
    """Queries grow with their position p, by 1 + rate * ln(1 + floor((p + first) / length)).

    Llama 4's temperature (arXiv:2501.19399), which Ministral 3 has too.
    """

    rate: float
    length: float
    first: int = 0


class RopeFrequencies(NamedTuple):
    """How fast each pair of dimensions rotates.

    Attributes:
        inverse: D / 2 angles in radians a position, exact in float32; 0 for pairs that do not
            rotate.
        scaling: factor on the cosines and sines of pairs that rotate (YaRN's temperature; 1 for
            other types).
        query_growth: factor on queries by position, after rope.
    """

    inverse: tuple[float, ...]
    scaling: float
    query_growth: QueryGrowth | None = None


def no_rope(head_dim: int) -> RopeFrequencies:
    """Return frequencies that rotate nothing (NoPE)."""
    return RopeFrequencies((0.0,) * (head_dim // 2), 1.0)


def rotary_order(head_dim: int, rotary_dim: int, *, is_interleaved: bool) -> list[int]:
    """Return the rows of a head in an order where dimension i rotates with i + D / 2.

    Args:
        rotary_dim: first rows of a head that rotate; the others follow in halves.
        is_interleaved: whether row 2i rotates with row 2i + 1 instead of i + rotary_dim / 2.
    """
    rotated, rest = range(rotary_dim), range(rotary_dim, head_dim)
    if is_interleaved:
        first, second = rotated[::2], rotated[1::2]
    else:
        first, second = rotated[: rotary_dim // 2], rotated[rotary_dim // 2 :]
    half = len(rest) // 2
    return [*first, *rest[:half], *second, *rest[half:]]


def rotary_size(parameters: dict[str, Any], head_dim: int) -> int:
    """Return the dimensions of a head that rotate."""
    return int(head_dim * parameters.get("partial_rotary_factor", 1.0))


def rope_frequencies(
    parameters: dict[str, Any], head_dim: int, max_model_len: int, served_len: int | None = None
) -> RopeFrequencies:
    """Compute a model's frequencies, for any supported way of stretching the context.

    Args:
        parameters: as in `Description.rope`.
        max_model_len: positions that the model was made for.
        served_len: positions that are served; None for all. Only longrope depends on it.

    Raises:
        UnsupportedModelError: the rope type is unknown, its frequencies depend on the length of
            the sequence, or a parameter is impossible.
    """
    known = _Parameters(
        **{n: parameters[n] for n in _Parameters.__struct_fields__ if n in parameters}
    )
    size = rotary_size(parameters, head_dim)
    if size % 2 or head_dim % 2 or not size:
        raise UnsupportedModelError(f"rope needs an even rotary dimension, not {size}")
    make = _TYPES.get(parameters["rope_type"])
    if make is None:
        raise UnsupportedModelError(
            f"unsupported rope type {parameters['rope_type']!r}; Legato supports "
            + ", ".join(_TYPES)
        )
    lengths = _Lengths(max_model_len, served_len or max_model_len)
    theta = known.rope_theta
    if parameters["rope_type"] == "dynamic":
        theta = _dynamic_theta(known, size)
    # The pairs that turn are those of a head as long as they, or the first ones of the whole head.
    length = head_dim if parameters["rope_type"] == "proportional" else size
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / length
    inverse, scaling = make(known, theta**exponents, lengths)
    if not all(0 < angle < math.inf for angle in inverse.tolist()):
        raise UnsupportedModelError(f"rope parameters {parameters} make no frequencies")
    still = (0.0,) * ((head_dim - size) // 2)
    return RopeFrequencies((*inverse.tolist(), *still), float(scaling), _growth(known))


class _Lengths(NamedTuple):
    """Attributes: made_for, served: positions."""

    made_for: int
    served: int


def _growth(known: _Parameters) -> QueryGrowth | None:
    if not known.llama_4_scaling_beta:
        return None
    return QueryGrowth(known.llama_4_scaling_beta, known.needed("original_max_position_embeddings"))


def _dynamic_theta(known: _Parameters, size: int) -> float:
    """Return the base for every length up to the model's: it grows only beyond that length.

    Hunyuan gives a fixed `alpha` instead of a factor.
    """
    factor = known.needed("factor") if known.alpha is None else 1.0
    growth = factor - (factor - 1) if known.alpha is None else known.alpha
    theta: float = (
        known.rope_theta * growth ** (size / (size - 2)) if size > 2 else known.rope_theta
    )
    return theta


def _default(_: _Parameters, periods: torch.Tensor, __: _Lengths) -> tuple[torch.Tensor, float]:
    return 1.0 / periods, 1.0


def _proportional(
    known: _Parameters, periods: torch.Tensor, _: _Lengths
) -> tuple[torch.Tensor, float]:
    """The slow pairs of a head stand still."""
    return 1.0 / periods / (known.factor or 1.0), 1.0


def _linear(known: _Parameters, periods: torch.Tensor, _: _Lengths) -> tuple[torch.Tensor, float]:
    """Chen et al., 2023, arXiv:2306.15595."""
    return 1.0 / periods / known.needed("factor"), 1.0


def _llama3(known: _Parameters, periods: torch.Tensor, _: _Lengths) -> tuple[torch.Tensor, float]:
    """Divide slow pairs by the factor, keep fast ones, and blend those between.

    Llama 3, 2024, arXiv:2407.21783.
    """
    low, high = known.needed("low_freq_factor"), known.needed("high_freq_factor")
    inverse, factor = 1.0 / periods, known.needed("factor")
    turns = known.needed("original_max_position_embeddings") / (2 * math.pi / inverse)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inverse / factor + kept * inverse, 1.0


def _yarn(
    known: _Parameters, periods: torch.Tensor, lengths: _Lengths
) -> tuple[torch.Tensor, float]:
    """Peng et al., 2023, arXiv:2309.00071."""
    factor = known.stretching(lengths.made_for)
    trained = known.needed("original_max_position_embeddings")
    head_dim = 2 * len(periods)

    def pair(num_turns: float) -> float:
        """Return the pair that rotates so many times within the length in training."""
        turns = math.log(trained / (num_turns * 2 * math.pi))
        return head_dim * turns / (2 * math.log(known.rope_theta))

    low, high = pair(known.beta_fast or _BETA_FAST), pair(known.beta_slow or _BETA_SLOW)
    if known.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(len(periods), dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    inverse = 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept
    return inverse, known.attention_factor or _temperature(known, factor)


def temperature(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's temperature of a context that is `factor` times as long as in training."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _temperature(known: _Parameters, factor: float) -> float:
    if known.mscale and known.mscale_all_dim:
        return temperature(factor, known.mscale) / temperature(factor, known.mscale_all_dim)
    return temperature(factor)


def _longrope(
    known: _Parameters, periods: torch.Tensor, lengths: _Lengths
) -> tuple[torch.Tensor, float]:
    """Ding et al., 2024, arXiv:2402.13753.

    Cached keys cannot change as a sequence grows, so one set of factors serves all sequences: the
    long one if sequences may be longer than in training.
    """
    trained = known.needed("original_max_position_embeddings")
    factors = known.long_factor if lengths.served > trained else known.short_factor
    if factors is None:
        raise UnsupportedModelError("the rope parameters lack short_factor or long_factor")
    if len(factors) != len(periods):
        raise UnsupportedModelError(
            f"longrope has {len(factors)} factors for {len(periods)} frequencies"
        )
    factor = known.stretching(lengths.made_for)
    scaling = known.attention_factor
    if scaling is None:
        scaling = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return 1.0 / (torch.tensor(factors) * periods), scaling


_TYPES = {
    "default": _default,
    "dynamic": _default,
    "linear": _linear,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""Key a rope type, value a function of its parameters, of theta to the powers of the pairs and of
the context length; it returns the angles, and the factor on cosines and sines."""


class RotaryTurns(NamedTuple):
    """How a step's rows rotate.

    Attributes:
        cos, sin: [T, 1, D], as `rotate` takes them: the first half of the sines is negated.
        query_scale: [T, 1, 1], factors on the rotated queries; None if there are none.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    query_scale: torch.Tensor | None

    def first(self, num_rows: int) -> "RotaryTurns":
        """Return the turns of the first rows."""
        scale = None if self.query_scale is None else self.query_scale[:num_rows]
        return RotaryTurns(self.cos[:num_rows], self.sin[:num_rows], scale)


class RotaryEmbedding(nn.Module):
    """Cosines and sines for the rows of one step.

    Attributes:
        inverse: [D / 2] float32, angles a position.
        scaling: factor on cosines and sines; [D / 2] if pairs differ.
    """

    def __init__(self, frequencies: RopeFrequencies, device: torch.device) -> None:
        super().__init__()
        self.query_growth = frequencies.query_growth
        inverse = torch.tensor(frequencies.inverse, dtype=torch.float32, device=device)
        self.register_buffer("inverse", inverse, persistent=False)  # [D / 2]
        self.inverse: torch.Tensor
        self.scaling: float | torch.Tensor = frequencies.scaling
        if frequencies.scaling != 1.0 and 0.0 in frequencies.inverse:
            self.scaling = torch.where(inverse == 0.0, 1.0, frequencies.scaling)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> RotaryTurns:
        """Compute cosines and sines in float32, then round to `dtype`.

        Args:
            positions: [T] int64.

        """
        angles = positions.to(torch.float32)[:, None] * self.inverse  # [T, D / 2]
        cos, sin = angles.cos(), angles.sin()
        if isinstance(self.scaling, torch.Tensor) or self.scaling != 1.0:
            cos, sin = cos * self.scaling, sin * self.scaling
        cos = torch.cat((cos, cos), dim=-1)
        sin = torch.cat((-sin, sin), dim=-1)
        scale = self.query_scale(positions)
        return RotaryTurns(
            cos.to(dtype)[:, None],
            sin.to(dtype)[:, None],
            None if scale is None else scale.to(dtype)[:, None, None],
        )

    def query_scale(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Return factors on the rotated queries, float32 [T]; None if there are none."""
        if self.query_growth is None:
            return None
        rate, length, first = self.query_growth
        return 1 + rate * torch.log1p(torch.floor((positions + first) / length))


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head by its row's angles.

    Args:
        heads: [T, N, D], any number N of heads.
        cos, sin: [T, 1, D] from `RotaryEmbedding`.

    Returns:
        [T, N, D].
    """
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return (heads * cos).add_(swapped.mul_(sin))
