"""Opens the headers of a checkpoint on the Hugging Face hub, without its weights."""

import torch
from msgspec.structs import replace

from legato.checkpoint.checkpoint import Checkpoint
from legato.checkpoint.described import read_spec, weight_shapes
from legato.checkpoint.hugging_face import (
    kept_bytes,
    num_labels,
    read_config,
    without_output,
)
from legato.checkpoint.quantization_config import method_of, schemes_of
from legato.checkpoint.scheme import Header
from legato.checkpoint.source import configured_source, hub_errors
from legato.core.config import ModelConfig
from legato.core.errors import ConfigError, UnsupportedModelError
from legato.core.validation import refusing_what_fails
from legato.model.architectures import text_config
from legato.model.config_keys import KeyUse, key_use
from legato.model.model import NamedWeights
from legato.model.spec import DecoderSpec

_OUTPUT = "lm_head.weight"


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
    contents = read_config(folder)
    text = text_config(contents)
    with refusing_what_fails(path):
        is_quantized = bool(schemes_of(text))
    headers = _headers(config)
    spec, dtype = read_spec(folder, contents, config)
    has_output = True
    if isinstance(spec, DecoderSpec):
        named = {_OUTPUT if name.endswith(f".{_OUTPUT}") else name for name in headers}
        spec, has_output = without_output(spec, contents, named)
    return Checkpoint(
        name=config.model,
        spec=spec,
        dtype=torch.bfloat16 if is_quantized else dtype or torch.bfloat16,
        shapes=weight_shapes(spec),
        tensors=_no_tensors,
        is_quantized=is_quantized,
        architecture=text["architectures"][0],
        quantization=method_of(text) if is_quantized else "",
        generates=has_output,
        num_labels=num_labels(headers),
        kept_bytes=kept_bytes(headers, contents),
        keys=key_use(contents) if isinstance(spec, DecoderSpec) else KeyUse(),
    )


def _headers(config: ModelConfig) -> dict[str, Header]:
    """Return the header of each tensor, which the hub reads from the files; key its name."""
    from huggingface_hub import get_safetensors_metadata  # slow to import
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    try:
        metadata = get_safetensors_metadata(config.model, revision=config.revision)
    except NotASafetensorsRepoError as error:
        raise UnsupportedModelError(f"{config.model} has no safetensors files") from error
    except SafetensorsParsingError as error:
        told = " ".join(str(error).split())
        raise UnsupportedModelError(f"{config.model} is not readable: {told}") from error
    except hub_errors() as error:
        told = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"could not read the headers of {config.model!r}: {told}") from error
    return {
        name: Header(tensor.dtype, tuple(tensor.shape))
        for file in metadata.files_metadata.values()
        for name, tensor in file.tensors.items()
    }


def _no_tensors(_: torch.device) -> NamedWeights:
    raise UnsupportedModelError("only the headers of this checkpoint were read")
