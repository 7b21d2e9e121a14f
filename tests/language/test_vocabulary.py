"""What a tokenizer knows and the model does not."""

import logging

import pytest

from legato.checkpoint.defaults import ModelDefaults, within_vocabulary
from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL
from legato.language.tokenizer.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_source(DEFAULT_MODEL))


@pytest.mark.parametrize(
    ("vocab_size", "eos_token_ids", "known", "warnings"),
    [
        (49_152, (0, 2), (0, 2), []),
        (49_216, (0, 2), (0, 2), []),
        (49_151, (2,), (2,), ["token ids up to 49151, but the model has 49151 tokens"]),
        (49_152, (2, 50_000), (2,), ["2, 50000, but the model has 49152 tokens: some of them"]),
        (49_152, (2**30,), (), ["outputs end only at max_tokens"]),
    ],
)
def test_what_is_outside_is_told_and_left_out(
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    known: tuple[int, ...],
    warnings: list[str],
) -> None:
    defaults = ModelDefaults(eos_token_ids=eos_token_ids, sampling={"temperature": 0.5})
    with caplog.at_level(logging.WARNING):
        kept = within_vocabulary(defaults, tokenizer.vocabulary.num_ids, vocab_size)
    assert kept == ModelDefaults(eos_token_ids=known, sampling={"temperature": 0.5})
    assert len(caplog.messages) == len(warnings)
    for message, warning in zip(caplog.messages, warnings, strict=True):
        assert warning in message
