"""The bodies and answers of POST /tokenize and /detokenize."""

from typing import Annotated

import msgspec
from pydantic import Field, model_validator

from legato.api.bodies.body_model import AtMost, ModelRequest
from legato.api.bodies.chat_messages import Messages, TemplateOptions
from legato.api.limits import MAX_DETOKENIZED
from legato.core.errors import InvalidRequestError


class TokenizeRequest(TemplateOptions, ModelRequest):
    """Either a prompt or messages."""

    prompt: str | None = None
    """Text; either this or `messages`."""
    messages: Messages | None = None
    """Conversation for the chat template."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens to `prompt`, the default."""
    return_token_strs: bool = False
    """Return the vocabulary's spelling of each token, too."""

    @model_validator(mode="after")
    def _check_together(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("give either prompt or messages", param="prompt")
        if self.messages is not None and self.add_special_tokens:
            raise InvalidRequestError(
                "special tokens of messages come from the template", param="add_special_tokens"
            )
        return self


class TokenizeAnswer(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(ModelRequest):
    tokens: Annotated[
        list[Annotated[int, Field(ge=0)]], Field(fail_fast=True), AtMost(MAX_DETOKENIZED)
    ]
    """Token ids."""


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    prompt: str
