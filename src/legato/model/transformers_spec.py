"""What Legato knows of a decoder that transformers' layers run."""

import msgspec
import torch

from legato.core.errors import ConfigError
from legato.core.validation import Size
from legato.model.model import CacheSpec, LayerCache
from legato.model.states import StateShape


class TransformersSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder of transformers, as its config.json and its layers describe it.

    Attributes:
        config: config.json, as JSON with sorted keys.
        max_model_len: positions that the model was made for (prompt plus output, in tokens).
        num_heads, num_kv_heads, head_dim: of every layer.
        windows: for each layer, keys visible to a query; None if all are.
        has_sinks: query heads have one more score each, without a value.
        embedding: name of the weight of the embedding.
        head: name of the weight of the output projection.
        tie_word_embeddings: that is the embedding, too.
        matrices: names of the weights of projections, which can be quantized.
    """

    config: str
    vocab_size: Size
    hidden_size: Size
    max_model_len: int
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    windows: tuple[int | None, ...]
    has_sinks: bool = False
    embedding: str
    head: str
    tie_word_embeddings: bool
    matrices: tuple[str, ...]

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def states(self) -> tuple[StateShape, ...]:
        """None: transformers' layers run no model with recurrent layers."""
        return ()

    def cache(self, dtype: torch.dtype) -> CacheSpec:
        """Return the layout of the KV cache, with values of `dtype`."""
        layers = (LayerCache(self.num_kv_heads, self.head_dim, own) for own in self.windows)
        return CacheSpec(layers=tuple(layers), dtype=dtype)

    def part(self, num_ranks: int) -> "TransformersSpec":
        """Return the spec of the only rank's part: all of it.

        Raises:
            ConfigError: there are several ranks.
        """
        if num_ranks > 1:
            raise ConfigError(
                "--tensor-parallel-size takes 1 for this model: transformers' layers are not "
                "divided among ranks"
            )
        return self
