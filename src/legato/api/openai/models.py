"""GET /v1/models."""

import time
from datetime import UTC, datetime
from http import HTTPStatus

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response

from legato.api.context import ApiContext, ContextDep
from legato.api.http.bodies import json_response
from legato.api.openapi import responses

router = APIRouter(tags=["OpenAI"])

_STARTED = int(time.time())


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model, with the fields of OpenAI, vLLM and Anthropic.

    Attributes:
        root, parent, max_model_len: vLLM's, the last in tokens.
        type, display_name, created_at, lifecycle, max_input_tokens, max_tokens: Anthropic's.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "legato"
    root: str
    parent: None = None
    max_model_len: int
    vocab_size: int
    type: str = "model"
    display_name: str
    created_at: str
    lifecycle: str = "active"
    max_input_tokens: int
    max_tokens: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: the last three are Anthropic's."""

    data: list[ModelCard]
    object: str = "list"
    has_more: bool = False
    first_id: str
    last_id: str


@router.get("/v1/models", responses=responses(ModelList))
async def list_models(context: ContextDep) -> Response:
    """List the names of the served model."""
    names = context.engine.info.served_model_names
    cards = [_card(context, name) for name in names]
    return json_response(ModelList(data=cards, first_id=names[0], last_id=names[-1]))


@router.get(
    "/v1/models/{model:path}", responses=responses(ModelCard, errors=(HTTPStatus.NOT_FOUND,))
)
async def retrieve_model(model: str, context: ContextDep) -> Response:
    """Return the model of this name."""
    context.check_model(model)
    return json_response(_card(context, model))


def _card(context: ApiContext, name: str) -> ModelCard:
    info = context.engine.info
    return ModelCard(
        id=name,
        created=_STARTED,
        root=info.model,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        display_name=name,
        created_at=datetime.fromtimestamp(_STARTED, UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=info.max_model_len,
        max_tokens=info.max_model_len,
    )
