"""How one family's checkpoints and config.json differ from Llama's."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_type_hints

from legato.model.description import Description
from legato.model.spec import DecoderSpec


class Architecture(NamedTuple):
    """A family of decoders, and how its checkpoints differ from Llama's.

    Attributes:
        model_type: the value of `model_type` in its config.json.
        spec: describes a decoder of the family. The type of its argument names the family's keys.
        defaults: of keys missing in config.json, if they differ from those of that type.
        implied: keys that its models have and its function does not read. Value the values that the
            function takes for granted; empty if the key has no effect with any value.
        names: key parts of a tensor's name, value what `Decoder` calls them.
        names_of: further names that depend on the decoder, applied after `names`.
        fused: projections that are stored as one, as `Decoder` would call them.
        is_fused_by_head: fused rows of queries, keys and values alternate, a head of each.
        has_partial_rope: rope may rotate only the first dimensions of a head.
        has_proportional_rope: rope may rotate only some of the pairs of dimensions i and i + D / 2.
        is_interleaved: rope rotates neighbours, not halves of a head.
        adds_one: norms are stored minus 1.
        has_transposed_experts: weights of experts are inputs by outputs, gates and ups alternate.
        may_transpose_experts: weights of all experts may be inputs by outputs, gates before ups.
        unused: ends of the names of tensors that are not weights.
        unused_prefixes: beginnings of such names.
        other_types: further values of `model_type`, which transformers does not know.
    """

    model_type: str
    spec: Callable[[Any], DecoderSpec]
    defaults: Mapping[str, Any]
    implied: Mapping[str, tuple[Any, ...]] = {}
    names: Mapping[str, str] = {}
    names_of: Callable[[DecoderSpec], Mapping[str, str]] = lambda _: {}
    fused: tuple[str, ...] = ()
    is_fused_by_head: bool = False
    has_partial_rope: bool = False
    has_proportional_rope: bool = False
    is_interleaved: bool = False
    adds_one: bool = False
    has_transposed_experts: bool = False
    may_transpose_experts: bool = False
    unused: tuple[str, ...] = ()
    unused_prefixes: tuple[str, ...] = ()
    other_types: tuple[str, ...] = ()

    @property
    def keys(self) -> type[Description]:
        """The keys of config.json that the family reads."""
        kind: type[Description] = next(iter(get_type_hints(self.spec).values()))
        return kind


def mistral_yarn(theta: float, factor: float, original_len: int) -> dict[str, Any]:
    """Return the rope parameters of Mistral's models whose queries grow with their position."""
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": original_len,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
