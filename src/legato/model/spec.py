"""The numbers and switches that distinguish one decoder from another; no code."""

import math
from typing import Annotated

import msgspec
import torch

from legato.core.errors import ConfigError, UnsupportedModelError
from legato.model.base import CacheSpec
from legato.model.rope import RopeFrequencies

_MODEL_LEN_LIMIT = 2**31

_Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class DecoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a decoder-only transformer.

    The annotations are the values that models have; a checkpoint's fields are checked.

    Attributes:
        max_model_len: positions that the model was made for (prompt plus output, in tokens).
        sliding_windows: for each layer, keys visible to a query; None if all are.
        tie_word_embeddings: the output projection is the embedding matrix.
        qkv_bias: the query, key and value projections have biases.
        output_bias: the attention's output projection has a bias.
        mlp_bias: the MLP's projections have biases.
        qk_norm: queries and keys are RMS-normalized a head before rope (Qwen3).

    Raises:
        UnsupportedModelError: query heads do not divide evenly among key/value heads, or the number
            of positions is out of range.
    """

    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_layers: _Size
    num_heads: _Size
    num_kv_heads: _Size
    head_dim: _Size
    rms_norm_eps: Annotated[float, msgspec.Meta(ge=1e-12, le=0.1)]
    max_model_len: int
    rope: RopeFrequencies
    sliding_windows: tuple[_Size | None, ...]
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if not 1 < self.max_model_len < _MODEL_LEN_LIMIT:
            raise UnsupportedModelError(f"{self.max_model_len} positions are not supported")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads"
            )

    def cache(self, dtype: torch.dtype) -> CacheSpec:
        """Return the layout of the KV cache, with values of `dtype`."""
        return CacheSpec(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            sliding_windows=self.sliding_windows,
            dtype=dtype,
        )

    def part(self, num_ranks: int) -> "DecoderSpec":
        """Return the spec of each rank's part of every layer; all ranks have the same.

        Raises:
            ConfigError: heads or the MLP cannot be divided among so many ranks.
        """
        divided = ("num_heads", "num_kv_heads", "intermediate_size")
        sizes = {name: getattr(self, name) for name in divided}
        fitting = math.gcd(*sizes.values())
        if fitting % num_ranks:
            counts = ", ".join(str(count) for count in range(1, fitting + 1) if not fitting % count)
            raise ConfigError(
                f"{self.num_heads} query heads, {self.num_kv_heads} key/value heads and an MLP of "
                f"{self.intermediate_size} cannot be divided among {num_ranks} ranks: "
                f"--tensor-parallel-size takes {counts} for this model"
            )
        parts = {name: size // num_ranks for name, size in sizes.items()}
        return msgspec.structs.replace(self, **parts)

    def reads_every_step(self, weight: str) -> bool:
        """Whether a step reads all of a weight; it does not read all of an untied embedding.

        Args:
            weight: its name in transformers' checkpoints.
        """
        return weight != "model.embed_tokens.weight" or self.tie_word_embeddings
