"""The tokens of prompts that become vectors or scores."""

from collections.abc import Sequence

from legato.engine.frontend.embedding import kept_tokens
from legato.server.requests.completion import Prompt
from legato.server.requests.embeddings import PooledOptions
from legato.text.tokenizer import Tokenizer


def input_tokens(
    prompt: Prompt, options: PooledOptions, tokenizer: Tokenizer, max_model_len: int
) -> Sequence[int]:
    """Return the tokens of a text or of token ids, truncated as the request says.

    Raises:
        InvalidRequestError: `kept_tokens` refuses it.
    """
    if not isinstance(prompt, str):
        return _kept(prompt, prompt, options, max_model_len)
    whole = bare = tokenizer.encode(prompt, options.add_special_tokens)
    if options.add_special_tokens and options.truncate_prompt_tokens is not None:
        bare = tokenizer.encode(prompt, add_special_tokens=False)
    return _kept(whole, bare, options, max_model_len)


def pair_tokens(
    query: str, text: str, options: PooledOptions, tokenizer: Tokenizer, max_model_len: int
) -> Sequence[int]:
    """Return the tokens of a query and a text, truncated as the request says.

    Raises:
        InvalidRequestError: `kept_tokens` refuses them.
    """
    whole = tokenizer.encode_pair(query, text, options.add_special_tokens)
    return _kept(whole, whole, options, max_model_len)


def _kept(
    whole: Sequence[int], bare: Sequence[int], options: PooledOptions, max_model_len: int
) -> Sequence[int]:
    count, side = options.truncate_prompt_tokens, options.truncation_side
    return kept_tokens(whole, bare, count, side, max_model_len)
