"""/v1/responses: its answers. Its requests are in `response_body.py`."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from legato.api.answer import respond
from legato.api.arrival import Arrival
from legato.api.bodies.body_model import Kind
from legato.api.context import ApiContext, ArrivalDep, ContextDep
from legato.api.http.bodies import EventStream, JsonBytes, json_response, pieces_response
from legato.api.http.errors import invalid_request, not_found
from legato.api.http.json_text import in_pieces, json_pieces
from legato.api.http.outlet import PacedResponse
from legato.api.job import InputItem, Job, NeedsStored, Part, Piece
from legato.api.openapi import body_route, responses
from legato.api.readers.reader_process import Reading
from legato.api.responses.background import BackgroundRun
from legato.api.responses.response_answer import ResponsesFormat
from legato.api.responses.response_body import InputTokenCount, ResponsesRequest, ResponseTerms
from legato.api.responses.response_events import ResponseAnswer
from legato.api.responses.store import ResponseStore, StoredResponse
from legato.api.submit import JobRun

router = APIRouter(tags=["OpenAI"])

_ERRORS = (HTTPStatus.NOT_FOUND,)


async def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.response_store
    return store


StoreDep = Annotated[ResponseStore, Depends(_store)]


class InputItemList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(msgspec.Struct, frozen=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


@router.post("/v1/responses", **body_route(ResponsesRequest, ResponseAnswer, streams=True))
async def create_response(
    body: JsonBytes, context: ContextDep, store: StoreDep, arrival: ArrivalDep
) -> Response:
    """Answer the next turn of a conversation, and store both for later turns."""
    parts, job = await _read("responses", body, context, store, arrival)
    assert isinstance(job, Job)
    terms = job.terms_as(ResponseTerms)
    run = JobRun(context, job, arrival)
    response = _new_response(arrival, parts, terms)

    def keep(body: list[bytes]) -> bool:
        response.body = body
        if terms.is_background:
            return store.count_again(arrival.tenant, response)
        return store.put(arrival.tenant, response)

    answer_format = ResponsesFormat(
        context.engine.vocabulary,
        job,
        arrival,
        model=context.model_name,
        keep=keep if terms.is_stored else None,
    )
    if not terms.is_background:
        return await respond(run, answer_format)
    background = response.run = BackgroundRun(
        run, answer_format, grown=lambda: store.count_again(arrival.tenant, response), finish=keep
    )
    if not store.put(arrival.tenant, response):
        background.drop()
        raise invalid_request("the response is too large to be stored (--max-stored-size)")
    try:
        await background.begun()
    except Exception:
        store.delete(arrival.tenant, response.id)
        raise
    return _shown(context, response, starting_after=-1 if job.answer.is_streamed else None)


@router.post(
    "/v1/responses/input_tokens", **body_route(ResponsesRequest, InputTokenCount, is_computed=False)
)
async def count_input_tokens(
    body: JsonBytes, context: ContextDep, store: StoreDep, arrival: ArrivalDep
) -> Response:
    """Count the tokens of a response's prompt."""
    parts, _ = await _read("input_tokens", body, context, store, arrival)
    return pieces_response([part.data for part in parts if isinstance(part, Piece)])


@router.get(
    "/v1/responses/{response_id}", responses=responses(ResponseAnswer, errors=_ERRORS, streams=True)
)
async def retrieve_response(
    response_id: str,
    context: ContextDep,
    store: StoreDep,
    arrival: ArrivalDep,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1, lt=2**63)] | None = None,
) -> Response:
    """Return a stored response, or its events."""
    if starting_after is not None and not stream:
        raise invalid_request("starting_after goes with stream=true only")
    response = store.get(arrival.tenant, response_id)
    after = -1 if starting_after is None else starting_after
    return _shown(context, response, starting_after=after if stream else None)


@router.delete("/v1/responses/{response_id}", responses=responses(DeletedResponse, errors=_ERRORS))
async def delete_response(response_id: str, store: StoreDep, arrival: ArrivalDep) -> Response:
    """Delete a stored response."""
    store.delete(arrival.tenant, response_id)
    return json_response(DeletedResponse(response_id))


@router.post(
    "/v1/responses/{response_id}/cancel", responses=responses(ResponseAnswer, errors=_ERRORS)
)
async def cancel_response(
    response_id: str, context: ContextDep, store: StoreDep, arrival: ArrivalDep
) -> Response:
    """End a response in the background."""
    response = store.get(arrival.tenant, response_id)
    if response.run is None:
        raise invalid_request(
            "Cannot cancel a synchronous response: only one with background: true; close its "
            "connection"
        )
    await response.run.cancelled()
    return _shown(context, response)


@router.get(
    "/v1/responses/{response_id}/input_items", responses=responses(InputItemList, errors=_ERRORS)
)
async def list_input_items(
    response_id: str,
    context: ContextDep,
    store: StoreDep,
    arrival: ArrivalDep,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """List the input items of a stored response."""
    items = store.get(arrival.tenant, response_id).input_items()
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item_id for item_id, _ in items]
        if after not in ids:
            raise not_found(f"there is no item {after!r} in this response's input")
        items = items[ids.index(after) + 1 :]
    shown = items[:limit]
    answer = InputItemList(
        data=[in_pieces(pieces) for _, pieces in shown],
        first_id=shown[0][0] if shown else None,
        last_id=shown[-1][0] if shown else None,
        has_more=len(items) > limit,
    )
    return PacedResponse(json_pieces(answer), context.turns)


async def _read(
    kind: Kind, body: bytearray, context: ApiContext, store: ResponseStore, arrival: Arrival
) -> Reading:
    """Read a body, with the stored responses that it needs."""
    parts, end = await context.text.read(kind, body, arrival)
    if not isinstance(end, NeedsStored):
        return parts, end
    stored = store.named(arrival.tenant, end)
    return await context.text.read(kind, body, arrival, stored)


def _new_response(arrival: Arrival, parts: Sequence[Part], terms: ResponseTerms) -> StoredResponse:
    items = tuple(part for part in parts if isinstance(part, InputItem))
    response_id = f"resp_{arrival.answer_id}"
    return StoredResponse(response_id, (), items, terms.previous_response_id)


def _shown(
    context: ApiContext, response: StoredResponse, *, starting_after: int | None = None
) -> Response:
    """Return a response as it is now.

    Args:
        starting_after: return its events after this one.

    Raises:
        ApiError: its events are not kept.
    """
    run = response.run
    if starting_after is not None:
        if run is None or run.log is None:
            raise invalid_request(
                "only a response with background: true and stream: true is streamed again"
            )
        return EventStream(run.log.after(starting_after))
    if run is None or response.body:
        return pieces_response(response.body)
    return PacedResponse(json_pieces(run.so_far), context.turns)
