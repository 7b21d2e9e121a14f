"""A model by its description alone: its spec, its dtype and the shapes of its weights."""

from pathlib import Path
from typing import Any

import torch

from legato.checkpoint.hugging_face import read_description, said_dtype
from legato.core.config import ModelConfig
from legato.model.decoder import Decoder
from legato.model.spec import DecoderSpec
from legato.model.transformers_families import runs_on_transformers
from legato.model.transformers_spec import TransformersSpec


def read_spec(
    folder: Path, contents: dict[str, Any], config: ModelConfig
) -> tuple[DecoderSpec | TransformersSpec, torch.dtype | None]:
    """Return the spec of the layers that run a folder's model, and the dtype that it names.

    Args:
        contents: of its config.json.

    Raises:
        UnsupportedModelError: Legato cannot run the model.
    """
    if runs_on_transformers(folder, contents, config.model_impl):
        # Local import: transformers' layers take seconds to import.
        from legato.checkpoint import transformers_checkpoint

        spec = transformers_checkpoint.read_spec(folder / "config.json", contents)
        return spec, transformers_checkpoint.said_dtype(contents)
    description, own_spec, _ = read_description(folder, config.max_model_len)
    return own_spec, said_dtype(description)


def weight_shapes(spec: DecoderSpec | TransformersSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights that a model has; key the name."""
    if isinstance(spec, TransformersSpec):
        # Local import: transformers' layers take seconds to import.
        from legato.checkpoint.transformers_tensors import TransformersTensors

        return TransformersTensors(spec).shapes
    on_paper = Decoder(spec, dtype=torch.float32, device=torch.device("meta"))
    return {name: tuple(slot.shape) for name, slot in on_paper.checkpoint_slots().items()}
