"""What a checkpoint says about how to generate from it."""

import logging

import msgspec

logger = logging.getLogger(__name__)


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
    """Warn of tokens outside the model's vocabulary, and leave out those that would end an output.

    Prompts that have such tokens are refused one by one: some tokenizers have a few too many, which
    no text needs.

    Args:
        num_token_ids: the tokenizer's, one more than the largest.
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
