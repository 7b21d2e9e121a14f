"""A checkpoint's defaults for generation. Torch-free: the zygote uses it."""

import logging
from typing import Any

import msgspec

from legato.checkpoint.json_file import read_json
from legato.checkpoint.source import ModelSource
from legato.core.errors import UnsupportedModelError
from legato.core.sampling_params import SamplingParams
from legato.model.wrappers import part_of

logger = logging.getLogger(__name__)

_MAX_TOKEN_ID = 2**31 - 1
"""Largest token id that fits into a message to the engine."""
_SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF_EOS_NAMES = ("eos", "eot", "eom")


class ModelDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Generation settings of a checkpoint.

    Attributes:
        eos_token_ids: tokens that end an output, ascending.
        sampling: key a field name of `SamplingParams`, value the model's default for it.
    """

    eos_token_ids: tuple[int, ...]
    sampling: dict[str, float | int]


def within_vocabulary(
    defaults: ModelDefaults, num_token_ids: int, vocab_size: int
) -> ModelDefaults:
    """Warn of tokens outside the model's vocabulary, and drop them from the end-of-sequence tokens.

    Prompts with such tokens are rejected one by one: some tokenizers have a few more tokens than
    the model, which no text needs.

    Args:
        num_token_ids: the tokenizer's largest id plus one.
        vocab_size: number of tokens that the model has an embedding for.
    """
    if num_token_ids > vocab_size:
        logger.warning(
            "the tokenizer has token ids up to %d, but the model has %d tokens: prompts with those "
            "that it lacks are refused",
            num_token_ids - 1,
            vocab_size,
        )
    known = tuple(token_id for token_id in defaults.eos_token_ids if token_id < vocab_size)
    if known != defaults.eos_token_ids:
        logger.warning(
            "the end-of-sequence tokens are %s, but the model has %d tokens: %s",
            ", ".join(map(str, defaults.eos_token_ids)),
            vocab_size,
            "some of them never come" if known else "outputs end only at max_tokens",
        )
    return msgspec.structs.replace(defaults, eos_token_ids=known)


def load_defaults(source: ModelSource, tokenizer_eos: int | None) -> ModelDefaults:
    """Collect the defaults from generation_config.json and config.json, or from GGUF metadata.

    Args:
        tokenizer_eos: the tokenizer's own end-of-sequence token; some checkpoints have no other.

    Raises:
        UnsupportedModelError: a file is not valid JSON, or has invalid settings.
    """
    if source.is_gguf:
        from legato.checkpoint.gguf_file import GGUFFile  # imports NumPy, which the server does not

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
    own = [contents.get("eos_token_id") for contents in (config, generation)]
    if own == [None, None] and (part := part_of(config)):
        own = [config[part].get("eos_token_id")]
    return ModelDefaults(eos_token_ids=_merge(tokenizer_eos, *own), sampling=sampling)


def _merge(*values: Any) -> tuple[int, ...]:
    token_ids: set[int] = set()
    for value in values:
        for token_id in value if isinstance(value, list) else [value]:
            if type(token_id) is int and 0 <= token_id <= _MAX_TOKEN_ID:
                token_ids.add(token_id)
            elif token_id is not None:
                raise UnsupportedModelError(f"{token_id!r} is no end-of-sequence token")
    return tuple(sorted(token_ids))
