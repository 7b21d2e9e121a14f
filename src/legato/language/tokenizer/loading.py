"""Loads a tokenizer, its chat template and a checkpoint's defaults.

Torch-free: the text processes use it.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from legato.checkpoint.defaults import ModelDefaults, load_defaults
from legato.checkpoint.source import ModelSource, resolve_tokenizer
from legato.core.config import ModelConfig
from legato.core.errors import ConfigError

if TYPE_CHECKING:
    from legato.language.tokenizer.tokenizer import Tokenizer


class TextSource(msgspec.Struct, frozen=True):
    """Paths of the files that `load_text` reads.

    Attributes:
        model, tokenizer: paths, as in `ModelSource`.
        chat_template: a template's text, in place of the tokenizer's own.
    """

    model: str
    tokenizer: str
    chat_template: str | None


def text_source(config: ModelConfig, source: ModelSource) -> TextSource:
    """Resolve a configuration's tokenizer and chat template.

    Args:
        source: the model's files.

    Raises:
        ConfigError: the tokenizer or the template's file does not exist.
    """
    tokenizer = source if config.tokenizer is None else resolve_tokenizer(config.tokenizer)
    template = config.chat_template
    return TextSource(
        model=str(source.path),
        tokenizer=str(tokenizer.path),
        chat_template=None if template is None else _template_text(template),
    )


def _template_text(given: str) -> str:
    """Return a file's contents, or `given` itself if it is a template's text."""
    if "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {given} cannot be read: {error}") from error


def load_text(source: TextSource) -> "tuple[Tokenizer, ModelDefaults]":
    """Load the tokenizer and the checkpoint's defaults.

    Raises:
        UnsupportedModelError: the tokenizer, or a file of settings, cannot be used.
    """
    # The server resolves paths, and never loads what reads them.
    from legato.language.tokenizer.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(ModelSource(Path(source.tokenizer)), source.chat_template)
    return tokenizer, load_defaults(ModelSource(Path(source.model)), tokenizer.eos_token_id)
