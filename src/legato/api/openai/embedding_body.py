"""The body of POST /v1/embeddings."""

from typing import Annotated, Literal

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema

from legato.api.bodies.body_model import ModelRequest, Name, Prompt
from legato.api.bodies.generation_options import ServiceOptions
from legato.api.openai.completion_body import PROMPT_SCHEMA, as_prompts

EncodingFormat = Literal["float", "base64"]


class EmbeddingTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer needs from its request.

    Attributes:
        encoding_format, dimensions: as in `EmbeddingRequest`.
        normalizes: whether each vector's L2 norm is made 1.
    """

    encoding_format: EncodingFormat
    dimensions: int | None
    normalizes: bool


class PooledOptions(ServiceOptions, ModelRequest):
    """Options of requests whose prompts become vectors or scores."""

    user: Name | None = None
    """Changes nothing: the client's note."""
    request_id: Name | None = None
    """Changes nothing: use the header `X-Request-Id`."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens to texts."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Keep at most this many tokens; -1 keeps what the context holds."""
    truncation_side: Literal["left", "right"] = "right"
    """The end that loses tokens."""


class EmbeddingRequest(PooledOptions):
    """Inputs that become vectors, however they were sent."""

    input: Annotated[
        list[Prompt],
        Field(fail_fast=True),
        BeforeValidator(as_prompts),
        WithJsonSchema(PROMPT_SCHEMA),
    ]
    """Text, token ids, or a list of either."""
    encoding_format: EncodingFormat = "float"
    """Numbers, or base64 of little-endian float32."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Return this many first numbers of each vector."""
    normalize: bool = True
    """Divide each vector by its L2 norm, after `dimensions`."""
