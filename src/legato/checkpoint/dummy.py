"""Random weights for a model's description. Speed does not depend on their values.

They are as large as trained weights. A matrix keeps the size of the rows that it multiplies, so
that no step overflows, and the best logits are clearly apart.
"""

import math
import zlib
from functools import partial

import torch

from legato.checkpoint.checkpoint import Checkpoint
from legato.checkpoint.described import read_spec, weight_shapes
from legato.checkpoint.gguf import open_gguf_checkpoint
from legato.checkpoint.hugging_face import read_config
from legato.checkpoint.source import ModelSource
from legato.core.config import ModelConfig
from legato.core.errors import ConfigError, UnsupportedModelError
from legato.model.model import NamedWeights
from legato.model.spec import DecoderSpec
from legato.model.transformers_spec import TransformersSpec

_FACTORS = ("norm.weight", ".layer_scalar", ".expert_scale")
"""Ends of the names of weights that are 1 on average."""


def open_dummy_checkpoint(config: ModelConfig, source: ModelSource) -> Checkpoint:
    """Open a checkpoint of random weights for a config.json or a GGUF file's description.

    The weights are the same at every start, on devices of the same kind. The folder needs no weight
    files.

    Raises:
        ConfigError: quantization gguf keeps a file's weights, but no file is read.
        UnsupportedModelError: Legato cannot run the model.
    """
    if config.quantization == "gguf":
        raise ConfigError("quantization gguf keeps a file's weights, which load_format dummy skips")
    spec, dtype = _described(config, source)
    shapes = weight_shapes(spec)
    return Checkpoint(
        name=f"dummy weights for {source.path}",
        spec=spec,
        dtype=dtype,
        shapes=shapes,
        tensors=partial(_random_tensors, shapes, dtype),
    )


def _described(
    config: ModelConfig, source: ModelSource
) -> tuple[DecoderSpec | TransformersSpec, torch.dtype]:
    if source.is_gguf:
        checkpoint = open_gguf_checkpoint(source.path, config.max_model_len)
        return checkpoint.spec, checkpoint.dtype
    contents = read_config(source.path)
    if contents.get("quantization_config"):
        raise UnsupportedModelError(
            f"{source.path} is quantized, and dummy weights are not; without its "
            "quantization_config they are, as --quantization says"
        )
    spec, dtype = read_spec(source.path, contents, config)
    return spec, dtype or torch.bfloat16


def _random_tensors(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> NamedWeights:
    """Yield tensors with a seed each, made on `device`: for a large model a CPU takes a minute."""
    for name, shape in shapes.items():
        if name.endswith(_FACTORS) or (name.endswith(".weight") and len(shape) == 1):
            yield name, torch.ones(shape, dtype=dtype, device=device)
            continue
        seeded = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(shape, dtype=dtype, device=device)
        yield name, values.normal_(std=math.prod(shape[-1:]) ** -0.5, generator=seeded)
