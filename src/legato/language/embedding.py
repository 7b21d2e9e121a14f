"""Both ends of an embedding: the text's tokens that are kept, and the vector that a caller gets.

Without numpy, which the server's process never loads.
"""

import math
from array import array
from collections.abc import Sequence
from typing import Literal

from legato.core.errors import InvalidRequestError

Side = Literal["left", "right"]


def kept_tokens(
    whole: Sequence[int], bare: Sequence[int], count: int | None, side: Side, max_model_len: int
) -> Sequence[int]:
    """Truncate a prompt as vLLM's `truncate_prompt_tokens` does for models that pool.

    Special tokens around the text stay: the last one is what many models pool.

    Args:
        whole: the prompt's tokens.
        bare: the same without the special tokens around it.
        count: of tokens to keep at most; -1 for as many as the context has, None for all.
        side: where tokens are dropped.

    Raises:
        InvalidRequestError: `count` is 0, or more than the model's context.
    """
    if count is None:
        return whole
    if count < -1 or not count:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be -1 or at least 1, got {count}",
            param="truncate_prompt_tokens",
        )
    if count > max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is {count}, which is more than the model's context of "
            f"{max_model_len} tokens",
            param="truncate_prompt_tokens",
        )
    count = max_model_len if count == -1 else count
    if len(whole) <= count:
        return whole
    whole, bare = list(whole), list(bare)
    num_added = len(whole) - len(bare)
    starts = (i for i in range(num_added + 1) if whole[i : i + len(bare)] == bare)
    start = next(starts, None)
    if start is None or count <= num_added:
        return _cut(whole, count, side)
    return [*whole[:start], *_cut(bare, count - num_added, side), *whole[start + len(bare) :]]


def _cut(token_ids: list[int], count: int, side: Side) -> list[int]:
    return token_ids[:count] if side == "right" else token_ids[len(token_ids) - count :]


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    """Raises `InvalidRequestError` if the model's vectors do not have so many numbers."""
    if dimensions is not None and not 1 <= dimensions <= hidden_size:
        raise InvalidRequestError(
            f"dimensions must be between 1 and {hidden_size} for this model, got {dimensions}",
            param="dimensions",
        )


def finished_embedding(pooled: bytes, *, dimensions: int | None, normalize: bool) -> "array[float]":
    """Return a vector, float32 [dimensions], as a caller gets it.

    Its first numbers are a vector of their own in models trained for that (Kusupati et al., 2022,
    arXiv:2205.13147), so its length is made 1 after the others were dropped.

    Args:
        pooled: float32 [E], as the engine returns it.
        dimensions: None for all.
        normalize: divide it by its L2 norm.
    """
    vector = array("f", pooled)[:dimensions]
    norm = math.hypot(*vector) if normalize else 0.0
    return array("f", [number / norm for number in vector]) if norm else vector
