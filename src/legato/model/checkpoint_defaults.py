"""Gathers what a checkpoint says about how to generate from it. Torch-free: the zygote uses it."""

from typing import Any

import msgspec

from legato.core.errors import UnsupportedModelError
from legato.core.sampling_params import SamplingParams
from legato.model.defaults import ModelDefaults
from legato.model.gguf_file import GGUFFile
from legato.model.json_file import read_json
from legato.model.source import ModelSource

_MAX_TOKEN_ID = 2**31 - 1
"""What a message to the engine has room for."""
_SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF_EOS_NAMES = ("eos", "eot", "eom")


def load_defaults(source: ModelSource, tokenizer_eos: int | None) -> ModelDefaults:
    """Gather the defaults from generation_config.json and config.json, or from GGUF metadata.

    Args:
        tokenizer_eos: the tokenizer's own end-of-sequence token, which some checkpoints name
            nowhere else.

    Raises:
        UnsupportedModelError: a file is not valid JSON, or names settings that are none.
    """
    if source.is_gguf:
        metadata = GGUFFile(source.path).metadata
        names = [f"tokenizer.ggml.{name}_token_id" for name in _GGUF_EOS_NAMES]
        return ModelDefaults(
            eos_token_ids=_merge(tokenizer_eos, *map(metadata.get, names)), sampling={}
        )
    config = read_json(source.path / "config.json")
    path = source.path / "generation_config.json"
    generation = read_json(path)
    sampling = {
        name: generation[name] for name in _SAMPLING_NAMES if generation.get(name) is not None
    }
    try:
        msgspec.convert(sampling, SamplingParams)
    except msgspec.ValidationError as error:
        raise UnsupportedModelError(f"{path} has unusable settings: {error}") from error
    return ModelDefaults(
        eos_token_ids=_merge(
            tokenizer_eos, config.get("eos_token_id"), generation.get("eos_token_id")
        ),
        sampling=sampling,
    )


def _merge(*values: Any) -> tuple[int, ...]:
    token_ids: set[int] = set()
    for value in values:
        for token_id in value if isinstance(value, list) else [value]:
            if type(token_id) is int and 0 <= token_id <= _MAX_TOKEN_ID:
                token_ids.add(token_id)
            elif token_id is not None:
                raise UnsupportedModelError(f"{token_id!r} is no end-of-sequence token")
    return tuple(sorted(token_ids))
