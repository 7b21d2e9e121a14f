"""POST /tokenize and /detokenize, as in vLLM."""

from http import HTTPStatus
from typing import Annotated

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import Field, model_validator

from legato.core.errors import InvalidRequestError
from legato.server.context import Context, ContextDep
from legato.server.generation.prompts import (
    ChatMessage,
    TemplateOptions,
    chat_token_ids,
    off_loop,
    prompt_token_ids,
)
from legato.server.http.bodies import JsonRoute, RequestModel, json_response
from legato.server.openapi import responses

router = APIRouter(route_class=JsonRoute, tags=["tokenization"])


class TokenizeRequest(TemplateOptions):
    """Either a prompt or messages.

    Attributes:
        add_special_tokens: of a prompt; None adds them. The template does so for messages.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

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


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    prompt: str


@router.post("/tokenize", responses=responses(TokenizeAnswer, errors=(HTTPStatus.NOT_FOUND,)))
async def tokenize(body: TokenizeRequest, context: ContextDep) -> Response:
    """The token ids of a prompt or a conversation."""
    context.check_model(body.model)
    token_ids = await _token_ids(context, body)
    return json_response(
        TokenizeAnswer(
            count=len(token_ids),
            max_model_len=context.client.info.max_model_len,
            tokens=token_ids,
            token_strs=_token_strs(context, token_ids) if body.return_token_strs else None,
        )
    )


@router.post("/detokenize", responses=responses(DetokenizeAnswer, errors=(HTTPStatus.NOT_FOUND,)))
async def detokenize(body: DetokenizeRequest, context: ContextDep) -> Response:
    """The text of token ids, special tokens included."""
    context.check_model(body.model)
    vocab_size = context.client.info.vocab_size
    if not all(0 <= token_id < vocab_size for token_id in body.tokens):
        raise InvalidRequestError(f"token ids must be in [0, {vocab_size})", param="tokens")
    decode = context.client.tokenizer.decode
    text = await off_loop(len(body.tokens), lambda: decode(body.tokens, skip_special_tokens=False))
    return json_response(DetokenizeAnswer(text))


async def _token_ids(context: Context, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        return await chat_token_ids(context, body.messages, body)
    assert body.prompt is not None, "checked by TokenizeRequest"
    add_special_tokens = body.add_special_tokens is not False
    (token_ids,) = await prompt_token_ids(
        context, [body.prompt], add_special_tokens=add_special_tokens
    )
    return token_ids


def _token_strs(context: Context, token_ids: list[int]) -> list[str]:
    """The vocabulary's own spelling of the tokens."""
    spelling = context.client.tokenizer.backend.id_to_token
    return [spelling(token_id) or "" for token_id in token_ids]
