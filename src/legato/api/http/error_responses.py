"""Responses of errors, in each API's format, also for those of FastAPI and Starlette."""

from http import HTTPStatus

import msgspec
from fastapi.exceptions import RequestValidationError
from msgspec import UNSET, UnsetType
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from legato.api.http.bodies import TypedEvent
from legato.api.http.errors import ApiError, as_api_error, first_problem, invalid_request
from legato.api.http.json_text import encode_json

_UNSUPPORTED = "thread_unsupported_request"
_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "api_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


class UnsupportedDetails(msgspec.Struct, frozen=True):
    """Attributes: `unsupported` names fields of the request."""

    error_code: str
    unsupported: list[str]


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    """Attributes: clients go on in another way by `details`, where they are present."""

    type: str
    message: str
    details: UnsupportedDetails | UnsetType = UNSET


class AnthropicErrorBody(TypedEvent, frozen=True, tag="error"):
    """An error answer, or the last event of a stream.

    Attributes:
        request_id: as in the header `request-id`.
    """

    error: AnthropicErrorDetail
    request_id: str


class OllamaErrorBody(msgspec.Struct, frozen=True):
    """An error answer, or the last line of a stream."""

    error: str


def anthropic_error(error: ApiError, request_id: str) -> AnthropicErrorBody:
    """Return an error in Anthropic's format."""
    kind = _TYPES.get(error.status, "invalid_request_error")
    details: UnsupportedDetails | UnsetType = UNSET
    if error.detail.code == _UNSUPPORTED and error.detail.param is not None:
        details = UnsupportedDetails(error.detail.code, [error.detail.param])
    detail = AnthropicErrorDetail(kind, error.detail.message, details)
    return AnthropicErrorBody(detail, request_id)


class ErrorResponse(Response):
    """An error in the format of the API that its path belongs to."""

    def __init__(self, error: ApiError) -> None:
        self._error = error
        super().__init__(
            error.body, error.status, dict(error.headers or {}), media_type="application/json"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        body: msgspec.Struct | None = None
        if state["api"] == "anthropic":
            body = anthropic_error(self._error, state["request_id"])
        elif state["api"] == "ollama":
            body = OllamaErrorBody(self._error.detail.message)
        if body is not None:
            self.body = encode_json(body)
            self.headers["Content-Length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_response(error: Exception) -> Response:
    return ErrorResponse(as_api_error(_own(error)))


def _own(error: Exception) -> Exception:
    match error:
        case RequestValidationError():
            return first_problem(error.errors())
        case HTTPException():
            return invalid_request(str(error.detail), error.status_code, error.headers)
    return error
