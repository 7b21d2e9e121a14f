"""Opens the headers of a checkpoint on the Hugging Face hub, without its weights."""

from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from legato.checkpoint.base import Checkpoint
from legato.checkpoint.hugging_face import read_description, said_dtype, without_output
from legato.checkpoint.json_file import read_json
from legato.checkpoint.quantization_config import method_of, scheme_of
from legato.checkpoint.scheme import Header, num_bytes
from legato.checkpoint.source import configured_source
from legato.checkpoint.weight_shapes import weight_shapes
from legato.core.config import ModelConfig
from legato.core.errors import ConfigError, UnsupportedModelError
from legato.core.validation import refusing_what_fails
from legato.model.architectures import text_config
from legato.model.base import NamedWeights
from legato.model.spec import DecoderSpec
from legato.model.transformers_families import runs_on_transformers
from legato.model.transformers_spec import TransformersSpec


def open_hub_headers(config: ModelConfig) -> Checkpoint:
    """Describe a model on the hub by its JSON files and the headers of its weight files.

    The hub serves a part of a file, so weights stay there; the result's `tensors` raises.

    Args:
        config: whose `model` is a hub id.

    Raises:
        ConfigError: there is no such model, or the hub cannot be reached.
        UnsupportedModelError: Legato cannot run it.
    """
    folder = configured_source(replace(config, load_format="dummy")).path
    path = folder / "config.json"
    contents = read_json(path)
    with refusing_what_fails(path):
        is_quantized = scheme_of(contents) is not None
    kept_bytes = _tensor_bytes(config)
    spec, dtype = _description(folder, contents, config)
    has_output = True
    if isinstance(spec, DecoderSpec):
        spec, has_output = without_output(spec, contents, kept_bytes)
    return Checkpoint(
        name=config.model,
        spec=spec,
        dtype=torch.bfloat16 if is_quantized else dtype or torch.bfloat16,
        shapes=weight_shapes(spec),
        tensors=_no_tensors,
        is_quantized=is_quantized,
        architecture=text_config(contents)["architectures"][0],
        quantization=method_of(contents) if is_quantized else "",
        generates=has_output,
        kept_bytes=kept_bytes,
    )


def _description(
    folder: Path, contents: dict[str, Any], config: ModelConfig
) -> tuple[DecoderSpec | TransformersSpec, torch.dtype | None]:
    """Return what is known of the layers, and the dtype that config.json names."""
    if runs_on_transformers(folder, contents, config.model_impl):
        # Local import: transformers' layers take seconds to import.
        from legato.checkpoint import transformers_checkpoint

        spec = transformers_checkpoint.read_spec(folder / "config.json", contents)
        return spec, transformers_checkpoint.said_dtype(contents)
    description, own_spec, _ = read_description(folder, config.max_model_len)
    return own_spec, said_dtype(description)


def _tensor_bytes(config: ModelConfig) -> dict[str, int]:
    """Return the size of each tensor, by the headers on the hub."""
    from huggingface_hub import get_safetensors_metadata  # slow to import
    from huggingface_hub.errors import NotASafetensorsRepoError

    try:
        metadata = get_safetensors_metadata(config.model, revision=config.revision)
    except NotASafetensorsRepoError as error:
        raise UnsupportedModelError(f"{config.model} has no safetensors files") from error
    except (OSError, ValueError) as error:
        told = " ".join(str(error).split())
        raise ConfigError(f"could not read the headers of {config.model!r}: {told}") from error
    return {
        name: num_bytes(Header(tensor.dtype, tuple(tensor.shape)))
        for file in metadata.files_metadata.values()
        for name, tensor in file.tensors.items()
    }


def _no_tensors(_: torch.device) -> NamedWeights:
    raise UnsupportedModelError("only the headers of this checkpoint were read")
