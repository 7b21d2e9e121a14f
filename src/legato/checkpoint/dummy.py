"""Random weights for a model's description. Speed does not depend on their values.

They are as large as trained weights. A matrix keeps the size of the rows that it multiplies, so
that no step overflows, and the best logits are clearly apart.
"""

import math
import zlib
from functools import partial

import torch

from legato.checkpoint.base import Checkpoint
from legato.checkpoint.gguf import open_gguf_checkpoint
from legato.checkpoint.hugging_face import read_description, said_dtype
from legato.checkpoint.json_file import read_json
from legato.checkpoint.source import ModelSource
from legato.core.config import ModelConfig
from legato.core.errors import ConfigError, UnsupportedModelError
from legato.model.base import NamedWeights
from legato.model.decoder import Decoder
from legato.model.spec import DecoderSpec


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
    spec, dtype = _described(source, config.max_model_len)
    on_paper = Decoder(spec, dtype=dtype, device=torch.device("meta"))
    shapes = {name: tuple(slot.shape) for name, slot in on_paper.checkpoint_slots().items()}
    return Checkpoint(
        name=f"dummy weights for {source.path}",
        spec=spec,
        dtype=dtype,
        shapes=shapes,
        tensors=partial(_random_tensors, shapes, dtype),
    )


def _described(source: ModelSource, served_len: int | None) -> tuple[DecoderSpec, torch.dtype]:
    if source.is_gguf:
        checkpoint = open_gguf_checkpoint(source.path)
        return checkpoint.spec, checkpoint.dtype
    description, spec, _ = read_description(source.path, served_len)
    if read_json(source.path / "config.json").get("quantization_config"):
        raise UnsupportedModelError(
            f"{source.path} is quantized, and dummy weights are not; without its "
            "quantization_config they are, as --quantization says"
        )
    return spec, said_dtype(description) or torch.bfloat16


def _random_tensors(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> NamedWeights:
    """Yield tensors with a seed each, made on `device`: for a large model a CPU takes a minute."""
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape, dtype=dtype, device=device)
            continue
        seeded = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(shape, dtype=dtype, device=device)
        yield name, values.normal_(std=math.prod(shape[-1:]) ** -0.5, generator=seeded)
