"""Tokenization endpoints, as in vLLM; their answers are in `requests/tokenization.py`."""

from http import HTTPStatus

from fastapi import APIRouter
from fastapi.responses import Response

from legato.server.context import ArrivalDep, ContextDep
from legato.server.http.anthropic_errors import AnthropicErrorBody
from legato.server.http.bodies import JsonBytes, pieces_response
from legato.server.openapi import responses, takes
from legato.server.requests.anthropic import MessagesRequest
from legato.server.requests.chat import ChatRequest
from legato.server.requests.completion import CompletionRequest
from legato.server.requests.responses import ResponsesRequest
from legato.server.requests.tokenization import (
    DetokenizeAnswer,
    DetokenizeRequest,
    RenderedPrompt,
    TokenizeAnswer,
    TokenizeRequest,
)

router = APIRouter(tags=["tokenization"])
info_router = APIRouter(tags=["tokenization"])


@router.post(
    "/tokenize",
    openapi_extra=takes(TokenizeRequest),
    responses=responses(TokenizeAnswer, errors=(HTTPStatus.NOT_FOUND,)),
)
async def tokenize(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Return the token ids of a prompt or a conversation."""
    return pieces_response(await context.text.answer("tokenize", body, arrival))


@router.post(
    "/detokenize",
    openapi_extra=takes(DetokenizeRequest),
    responses=responses(DetokenizeAnswer, errors=(HTTPStatus.NOT_FOUND,)),
)
async def detokenize(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Return the text of token ids, including special tokens."""
    return pieces_response(await context.text.answer("detokenize", body, arrival))


@router.post(
    "/v1/chat/completions/render",
    openapi_extra=takes(ChatRequest),
    responses=responses(RenderedPrompt, errors=(HTTPStatus.NOT_FOUND,)),
)
async def render_chat(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Return the prompt's token ids of a request to /v1/chat/completions."""
    return pieces_response(await context.text.answer("render_chat", body, arrival))


@router.post(
    "/v1/completions/render",
    openapi_extra=takes(CompletionRequest),
    responses=responses(RenderedPrompt, is_list=True, errors=(HTTPStatus.NOT_FOUND,)),
)
async def render_completions(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Return the token ids of each prompt of a request to /v1/completions."""
    return pieces_response(await context.text.answer("render_completions", body, arrival))


@router.post(
    "/v1/messages/render",
    openapi_extra=takes(MessagesRequest),
    responses=responses(
        RenderedPrompt, errors=(HTTPStatus.NOT_FOUND,), error_body=AnthropicErrorBody
    ),
)
async def render_messages(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Return the prompt's token ids of a request to /v1/messages."""
    return pieces_response(await context.text.answer("render_messages", body, arrival))


@router.post(
    "/v1/responses/render",
    openapi_extra=takes(ResponsesRequest),
    responses=responses(RenderedPrompt, errors=(HTTPStatus.NOT_FOUND,)),
)
async def render_response(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Return the prompt's token ids of a request to /v1/responses that needs no stored response."""
    return pieces_response(await context.text.answer("render_responses", body, arrival))


@info_router.get("/tokenizer_info", responses=responses())
async def tokenizer_info(context: ContextDep, arrival: ArrivalDep) -> Response:
    """Return the tokenizer's configuration, as in its tokenizer_config.json."""
    return pieces_response(await context.text.answer("tokenizer_info", bytearray(), arrival))
