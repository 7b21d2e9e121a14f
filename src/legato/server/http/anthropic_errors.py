"""Errors in the format of Anthropic's API, for its paths."""

from http import HTTPStatus

import msgspec

from legato.server.http.bodies import TypedEvent
from legato.server.http.errors import ApiError

_PATH = "/v1/messages"
_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "api_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(TypedEvent, frozen=True, tag="error"):
    """An error answer, or the last event of a stream.

    Attributes:
        request_id: as in the header `request-id`.
    """

    error: AnthropicErrorDetail
    request_id: str


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == _PATH or path.startswith(f"{_PATH}/")


def anthropic_error(error: ApiError, request_id: str) -> AnthropicErrorBody:
    """Return an error in Anthropic's format."""
    kind = _TYPES.get(error.status, "invalid_request_error")
    detail = AnthropicErrorDetail(kind, error.detail.message)
    return AnthropicErrorBody(detail, request_id)
