"""The bodies of POST /tokenize and /detokenize, and their answers."""

from collections.abc import Iterator
from typing import Annotated

import msgspec
from pydantic import Field, model_validator

from legato.api.bodies.body_model import AtMost, JobMaker, ModelRequest
from legato.api.bodies.chat_messages import Messages, TemplateOptions
from legato.api.bodies.chat_tools import functions_of
from legato.api.job import End, Part, answered
from legato.api.limits import MAX_DETOKENIZED
from legato.core.errors import InvalidRequestError
from legato.engine.client.requests import check_token_ids


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


class Tokenization(JobMaker):
    """Answers requests about tokens."""

    def tokenize(self, body: bytes) -> Iterator[Part | End]:
        request = self._parser.parse(TokenizeRequest, body)
        token_ids = self._token_ids(request)
        spelling = self._tokenizer.backend.id_to_token
        wants_spelling = request.return_token_strs
        yield from answered(
            TokenizeAnswer(
                count=len(token_ids),
                max_model_len=self._info.max_model_len,
                tokens=token_ids,
                token_strs=[spelling(i) or "" for i in token_ids] if wants_spelling else None,
            )
        )

    def detokenize(self, body: bytes) -> Iterator[Part | End]:
        request = self._parser.parse(DetokenizeRequest, body)
        check_token_ids(request.tokens, self._info.vocab_size, "tokens")
        text = self._tokenizer.decode(request.tokens, skip_special_tokens=False)
        yield from answered(DetokenizeAnswer(text))

    def info(self, _body: bytes) -> Iterator[Part | End]:
        yield from answered(self._tokenizer.info)

    def _token_ids(self, request: TokenizeRequest) -> list[int]:
        if request.messages is not None:
            return self._prompts.make(
                [message.for_template() for message in request.messages],
                request.conversation_options,
                functions_of(request.tools or ()),
                effort=request.effort,
            ).token_ids
        assert request.prompt is not None, "checked by TokenizeRequest"
        self._parser.check_fits(len(request.prompt), "prompt")
        return self._tokenizer.encode(request.prompt, request.add_special_tokens is not False)
