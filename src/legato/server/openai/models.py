"""GET /v1/models."""

import time
from http import HTTPStatus

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response

from legato.server.context import Context, ContextDep
from legato.server.http.bodies import json_response
from legato.server.openapi import responses

router = APIRouter(tags=["OpenAI"])

_STARTED = int(time.time())


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: `root`, `parent` and `max_model_len` (in tokens) are vLLM's."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "legato"
    root: str
    parent: None = None
    max_model_len: int
    vocab_size: int


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"


@router.get("/v1/models", responses=responses(ModelList))
async def list_models(context: ContextDep) -> Response:
    """The one model of this server, by each of its names."""
    names = context.client.info.served_model_names
    return json_response(ModelList([_card(context, name) for name in names]))


@router.get(
    "/v1/models/{model:path}", responses=responses(ModelCard, errors=(HTTPStatus.NOT_FOUND,))
)
async def retrieve_model(model: str, context: ContextDep) -> Response:
    """The model of this name."""
    context.check_model(model)
    return json_response(_card(context, model))


def _card(context: Context, name: str) -> ModelCard:
    info = context.client.info
    return ModelCard(
        id=name,
        created=_STARTED,
        root=info.model,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
    )
