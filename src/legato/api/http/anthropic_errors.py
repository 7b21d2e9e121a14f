"""Errors in the format of Anthropic's API, for its paths."""

from http import HTTPStatus

import msgspec
from msgspec import UNSET, UnsetType

from legato.api.http.bodies import TypedEvent
from legato.api.http.errors import ApiError

_PATH = "/v1/messages"
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


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == _PATH or path.startswith(f"{_PATH}/")


def anthropic_error(error: ApiError, request_id: str) -> AnthropicErrorBody:
    """Return an error in Anthropic's format."""
    kind = _TYPES.get(error.status, "invalid_request_error")
    details: UnsupportedDetails | UnsetType = UNSET
    if error.detail.code == _UNSUPPORTED and error.detail.param is not None:
        details = UnsupportedDetails(error.detail.code, [error.detail.param])
    detail = AnthropicErrorDetail(kind, error.detail.message, details)
    return AnthropicErrorBody(detail, request_id)
