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
    """Options of requests whose prompts become vectors or scores.

    Attributes:
        add_special_tokens: put the tokenizer's special tokens around each text.
        truncate_prompt_tokens: keep this many tokens of each prompt, those special tokens included;
            -1 keeps as many as the context has.
        truncation_side: where tokens are dropped.
    """

    user: Name | None = None
    request_id: Name | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] = "right"


class EmbeddingRequest(PooledOptions):
    """Attributes:
    input: a list of texts and of lists of token ids, however it was sent.
    dimensions: first so many numbers of each vector; None for all.
    normalize: divide each vector by its L2 norm.
    """

    input: Annotated[
        list[Prompt],
        Field(fail_fast=True),
        BeforeValidator(as_prompts),
        WithJsonSchema(PROMPT_SCHEMA),
    ]
    encoding_format: EncodingFormat = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    normalize: bool = True
