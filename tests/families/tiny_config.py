"""Configurations of tiny models, of transformers' classes and sizes that all share."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers import AutoConfig

VOCAB_SIZE = 320
WINDOW = 24
"""Keys visible to a query, in families with windows: fewer than a prompt has."""

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""Types of layers in configurations."""


class Tiny(NamedTuple):
    """Attributes: settings: of the configuration, besides the sizes that all have."""

    model_type: str
    settings: Mapping[str, Any] = MappingProxyType({})

    def config(self) -> Any:
        return AutoConfig.for_model(self.model_type, **{**_SIZES, **self.settings})
