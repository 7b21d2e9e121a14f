"""A checkpoint's defaults for generation. Torch-free: the zygote uses it."""

import logging
from pathlib import Path
from typing import Any

import msgspec

from legato.checkpoint.json_file import read_json
from legato.checkpoint.source import ModelSource
from legato.core.sampling_params import SamplingParams
from legato.model.wrappers import part_of

logger = logging.getLogger(__name__)

_MAX_TOKEN_ID = 2**31 - 1
"""Largest token id that fits into a message to the engine."""
_SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_GGUF_EOS_NAMES = ("eos", "eot", "eom")
GGUF_SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Key a field name of `SamplingParams`, value its name in GGUF metadata."""
_GGUF_DIGITS = 6
"""Of a float32."""


class ModelDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Generation settings of a checkpoint.

    Attributes:
        eos_token_ids: tokens that end an output, ascending.
        sampling: key a field name of `SamplingParams`, value the model's default for it.
        max_tokens: tokens of an output for which the client sets no limit; None for no default.
    """

    eos_token_ids: tuple[int, ...]
    sampling: dict[str, float | int]
    max_tokens: int | None = None


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

    Settings that no request could have are left out, and warned of.

    Raises:
        UnsupportedModelError: a file is not valid JSON.
    """
    if source.is_gguf:
        from legato.checkpoint.gguf_file import GGUFFile  # imports NumPy, which the server does not

        metadata = GGUFFile(source.path).metadata
        names = [f"tokenizer.ggml.{name}_token_id" for name in _GGUF_EOS_NAMES]
        found = {name: _shortest(metadata.get(key)) for name, key in GGUF_SAMPLING_KEYS.items()}
        return ModelDefaults(
            eos_token_ids=_merge(source.path, tokenizer_eos, *map(metadata.get, names)),
            sampling=_usable(found, source.path),
        )
    config = read_json(source.path / "config.json")
    path = source.path / "generation_config.json"
    generation = read_json(path)
    limit = _usable({"max_tokens": generation.get("max_new_tokens")}, path)
    own = [contents.get("eos_token_id") for contents in (config, generation)]
    if own == [None, None] and (part := part_of(config)):
        own = [config[part].get("eos_token_id")]
    return ModelDefaults(
        eos_token_ids=_merge(source.path, tokenizer_eos, *own),
        sampling=_usable({name: generation.get(name) for name in _SAMPLING_NAMES}, path),
        max_tokens=limit.get("max_tokens"),
    )


def _usable(found: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the settings that a request could have; warn of others."""
    settings: dict[str, Any] = {}
    for name, value in found.items():
        if value is None:
            continue
        try:
            msgspec.convert({name: value}, SamplingParams)
            settings[name] = value
        except msgspec.ValidationError as error:
            logger.warning("%s has a setting that is not used: %s", path, error)
    return settings


def _shortest(value: Any) -> Any:
    """Return a float32's shortest decimal form: 0.6, not 0.60000002."""
    return float(f"{value:.{_GGUF_DIGITS}g}") if isinstance(value, float) else value


def _merge(path: Path, *values: Any) -> tuple[int, ...]:
    token_ids: set[int] = set()
    for value in values:
        for token_id in value if isinstance(value, list) else [value]:
            if type(token_id) is int and 0 <= token_id <= _MAX_TOKEN_ID:
                token_ids.add(token_id)
            elif token_id is not None:
                logger.warning("%s: %.40r is no end-of-sequence token", path, token_id)
    return tuple(sorted(token_ids))
