"""Paths of a tokenizer and of a checkpoint's defaults; `loading.py` loads them."""

from pathlib import Path

import msgspec

from legato.checkpoint.source import ModelSource, resolve_tokenizer
from legato.core.config import ModelConfig
from legato.core.errors import ConfigError


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
