"""Tokens that a tokenizer or a generation config has, and the model does not. Torch-free."""

import logging

import msgspec

from legato.model.defaults import ModelDefaults
from legato.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def within_vocabulary(
    defaults: ModelDefaults, tokenizer: Tokenizer, vocab_size: int
) -> ModelDefaults:
    """Warn of tokens outside the model's vocabulary, and leave out those that would end an output.

    Prompts that have such tokens are refused one by one: some tokenizers have a few too many, which
    no text needs.

    Args:
        vocab_size: number of tokens that the model has an embedding for.
    """
    if tokenizer.largest_token_id >= vocab_size:
        logger.warning(
            "the tokenizer has token ids up to %d, but the model has %d tokens: prompts with those "
            "that it lacks are refused",
            tokenizer.largest_token_id,
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
