"""Endpoints that llama-server's web page and its routers read: /props and /slots."""

from collections.abc import Iterator
from http import HTTPStatus

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response

from legato.api.context import ApiContext, ArrivalDep, ContextDep
from legato.api.http.access import ADMINS_ONLY
from legato.api.http.bodies import json_response, pieces_response
from legato.api.http.errors import ApiError, ErrorDetail
from legato.api.http.json_text import encode_json
from legato.api.ollama.described_model import LlamaProps
from legato.api.openapi import responses

router = APIRouter(tags=["llama-server"])


class NextToken(msgspec.Struct, frozen=True):
    has_next_token: bool


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """A place for a running request, or for one that waits to run.

    Attributes:
        id: requests move to the next lower number when an earlier one ends.
        n_ctx: tokens of the context; requests share the cache.
        id_task: the request's id; empty without one.
        n_prompt_tokens: of the request.
    """

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    id_task: str
    n_prompt_tokens: int
    next_token: NextToken


@router.get("/props", responses=responses(LlamaProps))
async def props(context: ContextDep, arrival: ArrivalDep) -> Response:
    """Return the context, the model and its defaults."""
    return pieces_response(await context.text.answer("props", bytearray(), arrival))


@router.get("/slots", responses=responses(is_list=True, answer=Slot), dependencies=[ADMINS_ONLY])
async def slots(context: ContextDep, fail_on_no_slot: bool = False) -> Response:
    """Return a place for each request that may run at a time. For admins only.

    With `fail_on_no_slot`, the status is 503 while all are taken.
    """
    found = list(_slots(context))
    if fail_on_no_slot and all(slot.is_processing for slot in found):
        detail = ErrorDetail("no slot is free", "server_error", code="overloaded")
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, detail)
    return json_response(encode_json(found))


def _slots(context: ApiContext) -> Iterator[Slot]:
    info, running = context.engine.info, context.engine.unfinished
    is_drafting = info.scheduler.speculative not in (0, "off")
    for place in range(info.scheduler.max_num_seqs or 1):
        request = running[place] if place < len(running) else None
        yield Slot(
            id=place,
            n_ctx=info.max_model_len,
            speculative=is_drafting,
            is_processing=request is not None,
            id_task="" if request is None else request.request_id,
            n_prompt_tokens=0 if request is None else request.num_prompt_tokens,
            next_token=NextToken(request is not None),
        )
