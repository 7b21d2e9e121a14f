"""What distinguishes one decoder from another: numbers and switches, no code."""

import msgspec
import torch
from transformers import PreTrainedConfig

from legato.core.errors import UnsupportedModelError
from legato.model.base import CacheSpec
from legato.model.rope import RopeFrequencies, rope_frequencies

_MODEL_LEN_LIMIT = 2**31


class DecoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a decoder-only transformer.

    Attributes:
        max_model_len: positions the model was made for (prompt plus output, in tokens).
        sliding_windows: one entry a layer: keys visible to a query, None where all are.
        tie_word_embeddings: the output projection is the embedding matrix.
        qkv_bias: the query, key and value projections have biases.
        output_bias: so does the attention's output projection.
        mlp_bias: so do the MLP's projections.
        qk_norm: queries and keys are RMS-normalized a head before rope (Qwen3).

    Raises:
        UnsupportedModelError: query heads do not divide evenly among key/value heads, or the number
            of positions is out of range.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_model_len: int
    rope: RopeFrequencies
    sliding_windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.max_model_len < _MODEL_LEN_LIMIT:
            raise UnsupportedModelError(f"{self.max_model_len} positions are not supported")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads"
            )

    def cache(self, dtype: torch.dtype) -> CacheSpec:
        """What its attention keeps, in values of `dtype`."""
        return CacheSpec(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            sliding_windows=self.sliding_windows,
            dtype=dtype,
        )

    def reads_every_step(self, weight: str) -> bool:
        """Whether all of a weight is read in every step: an embedding of its own is not.

        Args:
            weight: its name in transformers' checkpoints.
        """
        return weight != "model.embed_tokens.weight" or self.tie_word_embeddings


def spec_from_config(
    config: PreTrainedConfig,
    *,
    sliding_windows: tuple[int | None, ...] | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderSpec:
    """Fill in what all supported configurations name alike; the keywords say what differs.

    Args:
        sliding_windows: None where no layer has one.

    Raises:
        UnsupportedModelError: an activation or rope type that Legato does not know.
    """
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"unsupported activation {config.hidden_act!r}; Legato supports 'silu'"
        )
    num_layers = config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return DecoderSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=num_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_model_len=config.max_position_embeddings,
        rope=rope_frequencies(config, head_dim),
        sliding_windows=sliding_windows or (None,) * num_layers,
        tie_word_embeddings=config.tie_word_embeddings,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def windows_from_layer_types(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """The sliding window of each layer, where `config.layer_types` names the layers that have one.

    Raises:
        UnsupportedModelError: a layer of a type other than full or sliding attention.
    """
    windows: list[int | None] = []
    for layer_type in config.layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"unsupported layer type {layer_type!r}")
        windows.append(config.sliding_window if layer_type == "sliding_attention" else None)
    return tuple(windows)
