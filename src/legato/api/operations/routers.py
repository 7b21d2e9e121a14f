"""Endpoints that vLLM's and SGLang's routers call before they send requests."""

import uuid

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response

from legato.api.context import ContextDep
from legato.api.http.bodies import json_response
from legato.api.http.json_text import encode_json
from legato.api.openapi import responses
from legato.core.version import __version__

router = APIRouter(tags=["routers"])

_INSTANCE = uuid.uuid4().hex


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes:
    model_id, served_model_name: the model's name in the API.
    model_path: the name or path that it was loaded by.
    instance_id: changes with each start of the server.
    kv_block_size: tokens of a cached block.
    """

    model_id: str
    served_model_name: str
    model_path: str
    instance_id: str = _INSTANCE
    kv_block_size: int
    max_model_len: int
    tp_size: int = 1
    dp_size: int = 1
    version: str = __version__


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: `model_path`: the name or path that the model was loaded by."""

    model_path: str
    served_model_name: str
    is_generation: bool = True
    vocab_size: int
    max_context_length: int


@router.get("/server_info", responses=responses(ServerInfo))
@router.get("/get_server_info", responses=responses(ServerInfo))
async def server_info(context: ContextDep) -> Response:
    """Return the model and the block size of its cache."""
    info = context.engine.info
    return json_response(
        ServerInfo(
            model_id=info.served_model_name,
            served_model_name=info.served_model_name,
            model_path=info.model,
            kv_block_size=info.cache.block_size,
            max_model_len=info.max_model_len,
        )
    )


@router.get("/model_info", responses=responses(ModelInfo))
@router.get("/get_model_info", responses=responses(ModelInfo))
async def model_info(context: ContextDep) -> Response:
    """Return the served model."""
    info = context.engine.info
    return json_response(
        ModelInfo(
            model_path=info.model,
            served_model_name=info.served_model_name,
            vocab_size=info.vocab_size,
            max_context_length=info.max_model_len,
        )
    )


@router.get("/kv_event_sources", responses=responses())
async def kv_event_sources(context: ContextDep) -> Response:
    """Return where cache events are published."""
    source = context.kv_event_source
    return json_response(encode_json({} if source is None else {"0": source}))
