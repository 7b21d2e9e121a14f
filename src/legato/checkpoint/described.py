"""The weights that a model needs, by its description alone."""

import torch

from legato.model.decoder import Decoder
from legato.model.spec import DecoderSpec
from legato.model.transformers_spec import TransformersSpec


def weight_shapes(spec: DecoderSpec | TransformersSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights that a model has; key the name."""
    if isinstance(spec, TransformersSpec):
        # Local import: transformers' layers take seconds to import.
        from legato.checkpoint.transformers_tensors import TransformersTensors

        return TransformersTensors(spec).shapes
    on_paper = Decoder(spec, dtype=torch.float32, device=torch.device("meta"))
    return {name: tuple(slot.shape) for name, slot in on_paper.checkpoint_slots().items()}
