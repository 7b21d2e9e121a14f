import pytest
from llguidance import LLTokenizer

from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL
from legato.grammar.tokens import grammar_tokenizer
from legato.language.tokenizer.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_source(DEFAULT_MODEL))


@pytest.fixture(scope="session")
def exact(tokenizer: Tokenizer) -> LLTokenizer:
    return grammar_tokenizer(tokenizer.vocabulary)
