"""Where what reads and writes texts is to be loaded from; `text_loader.py` loads it."""

from pathlib import Path

import msgspec

from legato.checkpoint.source import ModelSource, resolve_tokenizer
from legato.core.config import ModelConfig
from legato.core.errors import ConfigError


class TextSource(msgspec.Struct, frozen=True):
    """Where to load it from.

    Attributes:
        model, tokenizer: paths, as of `ModelSource`.
        chat_template: the text of one in place of the tokenizer's own.
    """

    model: str
    tokenizer: str
    chat_template: str | None


def text_source(config: ModelConfig, source: ModelSource) -> TextSource:
    """What the configuration says.

    Args:
        source: of the model.

    Raises:
        ConfigError: there is no such tokenizer, or no such file of a template.
    """
    tokenizer = source if config.tokenizer is None else resolve_tokenizer(config.tokenizer)
    template = config.chat_template
    return TextSource(
        model=str(source.path),
        tokenizer=str(tokenizer.path),
        chat_template=None if template is None else _template_text(template),
    )


def _template_text(given: str) -> str:
    """What a file holds, or the text itself, which no file's name looks like."""
    if "{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {given} cannot be read: {error}") from error
