"""Tokenization endpoints, as in vLLM; their answers are in `tokenization_body.py`."""

from fastapi import APIRouter
from fastapi.responses import Response

from legato.api.context import ArrivalDep, ContextDep
from legato.api.http.bodies import JsonBytes, pieces_response
from legato.api.openai.chat_body import ChatRequest
from legato.api.openai.tokenization_body import (
    DetokenizeAnswer,
    DetokenizeRequest,
    LlamaTokens,
    TemplatedPrompt,
    TokenizeAnswer,
    TokenizeRequest,
)
from legato.api.openapi import body_route, responses

router = APIRouter(tags=["tokenization"])
info_router = APIRouter(tags=["tokenization"])


@router.post(
    "/tokenize",
    **body_route(TokenizeRequest, TokenizeAnswer, is_computed=False, variants=(LlamaTokens,)),
)
async def tokenize(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Return the token ids of a prompt or a conversation."""
    return pieces_response(await context.text.answer("tokenize", body, arrival))


@router.post("/detokenize", **body_route(DetokenizeRequest, DetokenizeAnswer, is_computed=False))
async def detokenize(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Return the text of token ids."""
    return pieces_response(await context.text.answer("detokenize", body, arrival))


@router.post("/apply-template", **body_route(ChatRequest, TemplatedPrompt, is_computed=False))
async def apply_template(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Return a conversation as the chat template writes it."""
    return pieces_response(await context.text.answer("apply_template", body, arrival))


@info_router.get("/tokenizer_info", responses=responses())
async def tokenizer_info(context: ContextDep, arrival: ArrivalDep) -> Response:
    """Return the tokenizer's configuration, as in its tokenizer_config.json."""
    return pieces_response(await context.text.answer("tokenizer_info", bytearray(), arrival))
