"""The Python API's result of `LLM.embed`: a prompt and its vector."""

import msgspec


class EmbeddingOutput(msgspec.Struct, frozen=True):
    """A vector.

    Attributes:
        embedding: its numbers.
    """

    embedding: list[float]


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and its vector.

    Attributes:
        prompt: its text; None if it was given as tokens.
        prompt_token_ids: the prompt as the model saw it.
        outputs: its vector.
        num_cached_tokens: prompt tokens that were found in the cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int
