"""The default model's tokenizer, as Legato and as llguidance have it."""

from functools import cache

from llguidance import LLTokenizer

from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL
from legato.language.tokenizer.tokenizer import Tokenizer, load_tokenizer


@cache
def default_tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_source(DEFAULT_MODEL))


@cache
def default_llguidance() -> LLTokenizer:
    return LLTokenizer(default_tokenizer().backend.to_str())
