"""/v1/responses: its answers. Its requests are in `requests/responses.py`."""

from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from legato.server.arrival import Arrival
from legato.server.context import ArrivalDep, Context, ContextDep
from legato.server.generation.answer import respond
from legato.server.generation.job import Job
from legato.server.http.bodies import JsonBytes, json_response, pieces_response
from legato.server.http.errors import invalid_request, not_found
from legato.server.openai.responses.format import Keep, ResponsesFormat
from legato.server.openai.responses.output import ResponseAnswer
from legato.server.openai.responses.store import ResponseStore, StoredResponse
from legato.server.openapi import responses, takes
from legato.server.requests.outcome import Generation, InputItem, NeedsStored, Piece, ResponseTerms
from legato.server.requests.responses import InputTokenCount, ResponsesRequest
from legato.server.requests.serving import Kind
from legato.server.text.reader_process import Outcome

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


@router.post(
    "/v1/responses",
    openapi_extra=takes(ResponsesRequest),
    responses=responses(
        ResponseAnswer,
        errors=(HTTPStatus.NOT_FOUND, HTTPStatus.INTERNAL_SERVER_ERROR),
        streams=True,
    ),
)
async def create_response(
    body: JsonBytes, context: ContextDep, store: StoreDep, arrival: ArrivalDep
) -> Response:
    """Answer the next turn of a conversation, and store both for later turns."""
    outcome = await _outcome("responses", body, context, store, arrival)
    asked = outcome.end
    assert isinstance(asked, Generation)
    job = Job.of(
        asked,
        outcome.prompts,
        arrival=arrival,
        operation="responses",
        field_names={"prompt": "input", "max_tokens": "max_output_tokens"},
    )
    [terms] = [part for part in outcome.parts if isinstance(part, ResponseTerms)]
    answer_format = ResponsesFormat(
        context.engine.vocabulary,
        asked,
        job,
        terms,
        model=context.model_name,
        keep=_keep(store, arrival, outcome, terms) if terms.is_stored else None,
    )
    if kinds := ", ".join(terms.left_out_tools):
        arrival.warn(f"left out tools that this server cannot run: {kinds}")
    return await respond(context, job, answer_format)


@router.post(
    "/v1/responses/input_tokens",
    openapi_extra=takes(ResponsesRequest),
    responses=responses(InputTokenCount, errors=_ERRORS),
)
async def count_input_tokens(
    body: JsonBytes, context: ContextDep, store: StoreDep, arrival: ArrivalDep
) -> Response:
    """Return the length of a response's prompt, with all earlier turns."""
    outcome = await _outcome("input_tokens", body, context, store, arrival)
    return pieces_response([part.data for part in outcome.parts if isinstance(part, Piece)])


@router.get("/v1/responses/{response_id}", responses=responses(ResponseAnswer, errors=_ERRORS))
async def retrieve_response(
    response_id: str, store: StoreDep, arrival: ArrivalDep, stream: bool = False
) -> Response:
    """Return a stored response."""
    if stream:
        raise invalid_request("a stored response is not streamed again")
    return pieces_response(store.get(arrival.tenant, response_id).pieces())


@router.delete("/v1/responses/{response_id}", responses=responses(DeletedResponse, errors=_ERRORS))
async def delete_response(response_id: str, store: StoreDep, arrival: ArrivalDep) -> Response:
    """Delete a stored response."""
    store.delete(arrival.tenant, response_id)
    return json_response(DeletedResponse(response_id))


@router.post("/v1/responses/{response_id}/cancel", responses=responses(errors=_ERRORS))
async def cancel_response(response_id: str, store: StoreDep, arrival: ArrivalDep) -> Response:
    """Refused: close the connection to cancel a response."""
    store.get(arrival.tenant, response_id)
    raise invalid_request(
        "only responses with background: true can be cancelled, which there are none of here"
    )


@router.get(
    "/v1/responses/{response_id}/input_items", responses=responses(InputItemList, errors=_ERRORS)
)
async def list_input_items(
    response_id: str,
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
    data: Any = [msgspec.Raw(item) for _, item in shown]
    return json_response(
        InputItemList(
            data=data,
            first_id=shown[0][0] if shown else None,
            last_id=shown[-1][0] if shown else None,
            has_more=len(items) > limit,
        )
    )


async def _outcome(
    kind: Kind, body: bytearray, context: Context, store: ResponseStore, arrival: Arrival
) -> Outcome:
    """Read a body, with the stored responses that it needs."""
    outcome = await context.text.outcome(kind, body, arrival)
    if not isinstance(outcome.end, NeedsStored):
        return outcome
    stored = store.named(arrival.tenant, outcome.end)
    return await context.text.outcome(kind, body, arrival, stored)


def _keep(store: ResponseStore, arrival: Arrival, outcome: Outcome, terms: ResponseTerms) -> Keep:
    items = tuple(part for part in outcome.parts if isinstance(part, InputItem))

    def keep(body: bytearray) -> bool:
        response_id = f"resp_{arrival.answer_id}"
        response = StoredResponse(response_id, body, items, terms.previous_response_id)
        return store.put(arrival.tenant, response)

    return keep
