"""The keys of config.json, as each family names the ones that it reads. Torch-free.

A family's keys are the annotated attributes of a class beside its function, with their types and
with defaults for missing ones. Any other key cannot be read: mypy and `__getattr__` refuse it.
`config_keys.py` reports the keys of a file that no code reads.

transformers' own configurations are not used: to import one takes longer than to load the default
model.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Self, get_type_hints

import msgspec

from legato.core.errors import UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers in `layer_types`."""
_STRETCHED_TYPES = ("llama3", "yarn", "longrope")
"""Rope types that depend on the model's context length before it was stretched."""
_ONE_AXIS_TYPES = {"mrope": "default", "xdrope": "dynamic"}
"""Key a rope type of several positions a token, value what it is for text, whose are equal."""

SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "activation": ("mlp_hidden_act", "hidden_activation", "hidden_act"),
    "active_experts": (
        *("moe_topk", "moe_k", "experts_per_token", "top_k_experts", "num_experts_per_tok"),
    ),
    "compute_dtype": ("dtype", "torch_dtype"),
    "experts": ("num_experts", "n_routed_experts", "moe_num_experts", "num_local_experts"),
    "mlp_size": ("shared_intermediate_size", "block_ff_dim", "intermediate_size"),
    "norm_eps": (
        *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    ),
    "own_rope": ("rope_scaling", "rope_parameters"),
    "is_tied": ("tie_embedding", "tie_word_embeddings"),
}
"""The keys that mean one thing, key the noun; where a file has several, the first one wins.

A family reads those spellings that its class names.
"""


class Description:
    """The keys that all families read.

    Attributes:
        served_len: positions that are served, None for all; not a key of config.json.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    dtype: Any = None
    torch_dtype: Any = None

    def __init__(self, contents: Mapping[str, Any], served_len: int | None = None) -> None:
        """Read the keys of this family; others are left alone.

        Raises:
            msgspec.ValidationError: a key is missing, or its value is of another type.
        """
        self.served_len = served_len
        for name, kind in keys_of(type(self)).items():
            if name in contents:
                setattr(self, name, _converted(name, contents[name], kind))
            elif not hasattr(type(self), name):
                raise msgspec.ValidationError(f"Object missing required field `{name}`")

    if not TYPE_CHECKING:  # mypy would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"{type(self).__name__} does not name {name!r}, which is read")

    def replace(self, **values: Any) -> Self:
        """Return the description with other values of some keys."""
        if unnamed := set(values) - set(keys_of(type(self))):
            raise AttributeError(f"{type(self).__name__} does not name {', '.join(unnamed)}")
        changed = copy(self)
        vars(changed).update(values)
        return changed

    def spelled(self, noun: str) -> Any:
        """Return the value of a noun of `SPELLINGS`; None if the file and the family have none.

        Raises:
            AttributeError: the family names none of its keys.
        """
        named = [name for name in SPELLINGS[noun] if hasattr(self, name)]
        if not named:
            raise AttributeError(f"{type(self).__name__} names none of {SPELLINGS[noun]}")
        return next((value for name in named if (value := getattr(self, name)) is not None), None)

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


def keys_of(kind: type[Description]) -> Mapping[str, Any]:
    """Return the keys that a family names; value the type."""
    return get_type_hints(kind)


def _converted(name: str, value: object, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise msgspec.ValidationError(f"{message} - at `$.{name}{path or '`'}") from error


class RopeKeys(Description):
    """The keys of rotary positions that may differ by kind of layer.

    Attributes:
        rope_scaling: the name of `rope_parameters` in older checkpoints.
        partial_rotary_factor, original_max_position_embeddings: used if the rope parameters lack
            them.
    """

    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: float | None = None

    @property
    def own_rope(self) -> dict[str, Any]:
        """The rope parameters as the file has them; an empty spelling beside another is none."""
        return next(filter(None, (getattr(self, name) for name in SPELLINGS["own_rope"])), {})

    def rope_of(self, kind: str, *, theta: float) -> dict[str, Any]:
        """Return all rope parameters of one kind of layers, of a family where kinds differ.

        Older checkpoints have one set of parameters, apart from theta. It is for full attention.

        Args:
            kind: as in `layer_types`.
            theta: used if the parameters lack it.
        """
        own = self.own_rope
        if _is_nested(own):
            own = own.get(kind) or {}
        elif kind != FULL:
            own = {}
        return self._complete(own, theta)

    def _complete(self, own: Mapping[str, Any], theta: float) -> dict[str, Any]:
        rope = {"rope_theta": theta, "rope_type": own.get("type", "default"), **own}
        rope["rope_type"] = _ONE_AXIS_TYPES.get(str(rope["rope_type"]), rope["rope_type"])
        if self.partial_rotary_factor is not None:
            rope.setdefault("partial_rotary_factor", self.partial_rotary_factor)
        if rope["rope_type"] in _STRETCHED_TYPES:
            rope.setdefault("original_max_position_embeddings", self.max_position_embeddings)
            if self.original_max_position_embeddings is not None:
                rope["original_max_position_embeddings"] = self.original_max_position_embeddings
        return rope


class Rotary(RopeKeys):
    """The keys of rotary positions; rope_theta is used if the rope parameters lack it."""

    rope_theta: float = 10000.0

    @property
    def rope(self) -> dict[str, Any]:
        """All rope parameters of the layers, including the type.

        Raises:
            UnsupportedModelError: layers have parameters of their own.
        """
        own = self.own_rope
        if _is_nested(own):
            raise UnsupportedModelError("rope parameters of each kind of layer are not supported")
        return self._complete(own, self.rope_theta)


class Plain(Rotary):
    """The keys of the plain decoder: RMS norms, and an MLP with SiLU unless a file says more."""

    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6


class Biased(Plain):
    """The keys of a plain decoder that may have biases in its attention."""

    attention_bias: bool = False


class Windowed(Description):
    """The keys of sliding windows by layer."""

    sliding_window: int | None = 4096
    layer_types: list[str] | None = None

    def kinds(self, interval: int) -> tuple[str, ...]:
        """Return the kind of attention of each layer: `layer_types`, or a pattern if it is missing.

        Args:
            interval: of the pattern, whose every so many-th layer has full attention; 0 for
                full attention everywhere.

        Raises:
            UnsupportedModelError: a layer of a type other than full or sliding attention.
        """
        types = self.layer_types
        if types is None:
            return tuple(
                SLIDING if interval and (i + 1) % interval else FULL
                for i in range(self.num_hidden_layers)
            )
        if len(types) != self.num_hidden_layers:
            raise UnsupportedModelError(
                f"layer_types has {len(types)} entries for {self.num_hidden_layers} layers"
            )
        for layer_type in types:
            if layer_type not in (FULL, SLIDING):
                raise UnsupportedModelError(f"unsupported layer type {layer_type!r}")
        return tuple(types)

    def windows_of(self, kinds: Sequence[str]) -> tuple[int | None, ...]:
        """Return the sliding window of each layer, None for layers with full attention."""
        return tuple(self.sliding_window if kind == SLIDING else None for kind in kinds)

    def windows(self, window: int | None, *, num_full: int) -> tuple[int | None, ...]:
        """Return the sliding window of each layer, None for layers with full attention.

        Args:
            window: of the layers with one.
            num_full: number of first layers without one, used if `layer_types` is missing.

        Raises:
            UnsupportedModelError: a layer of a type other than full or sliding attention.
        """
        if self.layer_types is None:
            return tuple(window if i >= num_full else None for i in range(self.num_hidden_layers))
        return tuple(window if kind == SLIDING else None for kind in self.kinds(0))


class ExpertKeys(Description):
    """The keys of mixtures of experts; a file may have the number of experts in any of two."""

    num_experts: int | None = None
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | list[int] | None = None

    @property
    def expert_count(self) -> int:
        """Experts of a layer with experts; 0 if there are none."""
        return int(self.spelled("experts"))

    @property
    def active_expert_count(self) -> int:
        """Experts that compute a token.

        Raises:
            UnsupportedModelError: layers differ.
        """
        return _same(self.spelled("active_experts"), "moe_topk")

    @property
    def expert_size(self) -> int:
        """Width of an expert.

        Raises:
            UnsupportedModelError: layers differ.
        """
        if self.moe_intermediate_size is None:
            return self.intermediate_size
        return _same(self.moe_intermediate_size, "moe_intermediate_size")


def _same(values: int | list[int], name: str) -> int:
    """Return the one value that all layers have."""
    if isinstance(values, int):
        return values
    if len(set(values)) != 1:
        raise UnsupportedModelError(f"{name} differs between layers, which is not supported")
    return values[0]


def _is_nested(parameters: Mapping[str, Any]) -> bool:
    """Whether rope parameters are given for each kind of layers."""
    return any(isinstance(value, Mapping) for value in parameters.values())
