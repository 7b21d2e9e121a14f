"""Loads a tokenizer, its chat template and a checkpoint's defaults.

Torch-free: the text processes use it.
"""

from pathlib import Path

from legato.checkpoint.defaults import ModelDefaults, load_defaults
from legato.checkpoint.source import ModelSource
from legato.language.tokenizer.text_source import TextSource
from legato.language.tokenizer.tokenizer import Tokenizer, load_tokenizer


def load_text(source: TextSource) -> tuple[Tokenizer, ModelDefaults]:
    """Load the tokenizer and the checkpoint's defaults.

    Raises:
        UnsupportedModelError: the tokenizer, or a file of settings, cannot be used.
    """
    tokenizer = load_tokenizer(ModelSource(Path(source.tokenizer)), source.chat_template)
    return tokenizer, load_defaults(ModelSource(Path(source.model)), tokenizer.eos_token_id)
