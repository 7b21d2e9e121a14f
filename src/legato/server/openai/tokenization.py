"""POST /tokenize and /detokenize, as in vLLM; `requests/tokenization.py` is what they answer."""

from http import HTTPStatus

from fastapi import APIRouter
from fastapi.responses import Response

from legato.server.context import ContextDep
from legato.server.http.bodies import JsonBytes, pieces_response
from legato.server.openapi import responses, takes
from legato.server.requests.tokenization import (
    DetokenizeAnswer,
    DetokenizeRequest,
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
async def tokenize(body: JsonBytes, context: ContextDep) -> Response:
    """The token ids of a prompt or a conversation."""
    return pieces_response(await context.text.answer("tokenize", body))


@router.post(
    "/detokenize",
    openapi_extra=takes(DetokenizeRequest),
    responses=responses(DetokenizeAnswer, errors=(HTTPStatus.NOT_FOUND,)),
)
async def detokenize(body: JsonBytes, context: ContextDep) -> Response:
    """The text of token ids, special tokens included."""
    return pieces_response(await context.text.answer("detokenize", body))


@info_router.get("/tokenizer_info", responses=responses())
async def tokenizer_info(context: ContextDep) -> Response:
    """How the tokenizer is set up, as in its tokenizer_config.json."""
    return pieces_response(await context.text.answer("tokenizer_info", bytearray()))
