"""OpenAI's error object, and the status of each error. The text processes use it too."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from legato.api.limits import READER_MEMORY_BYTES
from legato.core.errors import InvalidRequestError
from legato.core.spelling import did_you_mean
from legato.engine.errors import (
    EngineDeadError,
    NoTokenLeftError,
    OverloadedError,
    RequestFailedError,
    SlowReaderError,
)

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_RESTART_S = "5"  # time for another server to start
_LOADING_S = "2"  # small models load in this time
_CLOSE = {"Connection": "close"}  # the rest of the body is not read
_TAG = re.compile(r"<.*>|[\w-]+\[.*\]|constrained-\w+")
"""A union's tag in pydantic's path."""
_SCALARS = {"bool", "str", "int", "float"}
"""Tags, too, at the end of a path."""
_MAX_CHARS = 1000
"""The most characters of an error: it may quote the client's values, but not megabytes of them."""
_LIKENESS = 0.8
"""The least likeness for a hint: many fields of other servers resemble one of Legato's."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """Attributes: OpenAI's; `param` is the offending field, dotted if nested."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(Exception):
    """An error to send to the client."""

    def __init__(
        self, status: int, detail: ErrorDetail, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail.message)
        self.status = status
        self.detail = msgspec.structs.replace(
            detail,
            message=_shortened(detail.message),
            param=detail.param and _shortened(detail.param),
        )
        self.headers = headers

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(self.detail))


def invalid_request(
    message: str, status: int = HTTPStatus.BAD_REQUEST, headers: Mapping[str, str] | None = None
) -> ApiError:
    return ApiError(status, ErrorDetail(message, _INVALID), headers)


def invalid_key() -> ApiError:
    detail = ErrorDetail(
        "the API key is missing or wrong; send 'Authorization: Bearer KEY', or 'x-api-key: KEY'",
        "authentication_error",
        code="invalid_api_key",
    )
    return ApiError(HTTPStatus.UNAUTHORIZED, detail, {"WWW-Authenticate": "Bearer"})


def admin_key_required(*, is_other_sent: bool) -> ApiError:
    """Args: is_other_sent: whether the client sent a key that is not an admin's."""
    detail = ErrorDetail(
        "this needs an admin key (--admin-api-key); send 'Authorization: Bearer KEY'",
        "permission_error" if is_other_sent else "authentication_error",
        code="admin_key_required",
    )
    if is_other_sent:
        return ApiError(HTTPStatus.FORBIDDEN, detail)
    return ApiError(HTTPStatus.UNAUTHORIZED, detail, {"WWW-Authenticate": "Bearer"})


def from_this_machine_only() -> ApiError:
    message = (
        "only clients on the server's machine that connect to it directly, without a proxy, may "
        "do this; --admin-api-key lets others"
    )
    detail = ErrorDetail(message, "permission_error", code="from_this_machine_only")
    return ApiError(HTTPStatus.FORBIDDEN, detail)


def host_not_allowed(host: str) -> ApiError:
    message = f"the server does not go by the name {host!r}; --allowed-host lets it"
    detail = ErrorDetail(message, _INVALID, code="host_not_allowed")
    return ApiError(HTTPStatus.FORBIDDEN, detail)


def origin_not_allowed(origin: str | None) -> ApiError:
    """Args: origin: None if the browser does not say."""
    pages = "other sites" if origin is None else f"the origin {origin!r}"
    message = f"web pages of {pages} may not use this server; --allowed-origins lets them"
    detail = ErrorDetail(message, _INVALID, code="origin_not_allowed")
    return ApiError(HTTPStatus.FORBIDDEN, detail)


def body_too_large(max_body_bytes: int) -> ApiError:
    message = f"the body is larger than {max_body_bytes} bytes"
    detail = ErrorDetail(message, _INVALID, code="request_too_large")
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail, _CLOSE)


def too_many_bodies() -> ApiError:
    message = "too many large bodies are being received"
    detail = ErrorDetail(message, "rate_limit_error", code="overloaded")
    return ApiError(HTTPStatus.TOO_MANY_REQUESTS, detail, {"Retry-After": _RESTART_S, **_CLOSE})


def trace_conflict(message: str) -> ApiError:
    return ApiError(HTTPStatus.CONFLICT, ErrorDetail(message, _INVALID, code="trace_conflict"))


def malformed_http() -> ApiError:
    return invalid_request("this is not valid HTTP")


def one_host_needed() -> ApiError:
    return invalid_request("a request has one Host header (of HTTP/1.0, one at most)")


def unknown_transfer_coding() -> ApiError:
    message = "of transfer codings, the server knows chunked alone"
    detail = ErrorDetail(message, _INVALID, code="unknown_transfer_coding")
    return ApiError(HTTPStatus.NOT_IMPLEMENTED, detail)


def headers_too_large(max_header_bytes: int) -> ApiError:
    message = f"the headers are larger than {max_header_bytes} bytes"
    detail = ErrorDetail(message, _INVALID, code="headers_too_large")
    return ApiError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, detail)


def too_slow(message: str) -> ApiError:
    detail = ErrorDetail(message, _INVALID, code="request_timeout")
    return ApiError(HTTPStatus.REQUEST_TIMEOUT, detail)


def too_many_connections(max_connections: int) -> ApiError:
    message = f"the server already has {max_connections} connections"
    detail = ErrorDetail(message, _SERVER, code="overloaded")
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, detail, {"Retry-After": _RESTART_S})


def shutting_down() -> ApiError:
    detail = ErrorDetail("the server is shutting down", _SERVER, code="shutting_down")
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, detail, {"Retry-After": _RESTART_S})


def still_loading() -> ApiError:
    detail = ErrorDetail("the server is loading the model", _SERVER, code="loading")
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, detail, {"Retry-After": _LOADING_S})


def readers_dead() -> ApiError:
    message = "the processes that read requests died, and are being started again"
    detail = ErrorDetail(message, _SERVER, code="readers_dead")
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, detail, {"Retry-After": _RESTART_S})


def unknown_model(asked: str, served: Iterable[str]) -> ApiError:
    names = " or ".join(map(repr, served))
    message = f"the model {asked!r} does not exist here; this server has {names}"
    detail = ErrorDetail(message, _INVALID, param="model", code="model_not_found")
    return ApiError(HTTPStatus.NOT_FOUND, detail)


def not_found(message: str) -> ApiError:
    return ApiError(HTTPStatus.NOT_FOUND, ErrorDetail(message, _INVALID, code="not_found"))


def no_json_object() -> InvalidRequestError:
    return InvalidRequestError(
        "the body must be a JSON object, sent with 'Content-Type: application/json'"
    )


def out_of_memory() -> InvalidRequestError:
    return InvalidRequestError(
        f"reading this request takes more than {READER_MEMORY_BYTES >> 20} MiB of memory"
    )


def as_api_error(error: Exception) -> ApiError:
    """Return the error to send to the client. It reveals nothing of an unexpected error."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            detail = ErrorDetail(str(error), _INVALID, error.param, error.code)
            return ApiError(HTTPStatus.BAD_REQUEST, detail)
        case OverloadedError():
            detail = ErrorDetail(str(error), "rate_limit_error", code="overloaded")
            headers = _retry_after(error.retry_after_s)
            return ApiError(HTTPStatus.TOO_MANY_REQUESTS, detail, headers)
        case SlowReaderError():
            detail = ErrorDetail(str(error), _INVALID, code="slow_reader")
            return ApiError(HTTPStatus.REQUEST_TIMEOUT, detail)
        case NoTokenLeftError():
            detail = ErrorDetail(str(error), _INVALID, code="no_token_left")
            return ApiError(HTTPStatus.BAD_REQUEST, detail)
        case RequestFailedError():
            detail = ErrorDetail(str(error), _SERVER, code="request_failed")
            return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, detail)
        case EngineDeadError():
            detail = ErrorDetail(str(error), _SERVER, code="engine_dead")
            headers = _retry_after(error.retry_after_s)
            return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, detail, headers)
        case _:
            detail = ErrorDetail("internal error", _SERVER)
            return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, detail)


def _retry_after(seconds: float | None) -> dict[str, str]:
    return {} if seconds is None else {"Retry-After": str(max(1, math.ceil(seconds)))}


def first_problem(problems: Sequence[Any], known: Iterable[str] = ()) -> InvalidRequestError:
    """Return the error for a body that fails validation.

    Args:
        problems: pydantic's, each with keys "type", "loc", "msg" and perhaps "ctx".
        known: fields at the top level, for hints.
    """
    problem = problems[0]
    cause = problem.get("ctx", {}).get("error")
    path = [*_without_tags(problem), *getattr(cause, "path", ())]
    param = ".".join(map(str, path)) or None
    if isinstance(cause, InvalidRequestError):
        return cause
    if param is None:
        return no_json_object()
    if problem["type"] == "extra_forbidden":
        hint = did_you_mean(param, known, likeness=_LIKENESS)
        return InvalidRequestError(
            f"{param} is not supported{hint}", param=param, code="unsupported_parameter"
        )
    if problem["type"] == "missing":
        return InvalidRequestError(f"{param} is missing", param=param)
    return InvalidRequestError(f"{param}: {cause or problem['msg']}", param=param)


def _without_tags(problem: Any) -> list[str | int]:
    """Return a problem's path without pydantic's tags, but with a client's field named like one."""
    path = problem["loc"]
    is_named = len(path) == 1 or problem["type"] == "extra_forbidden"
    within, last = (path[:-1], path[-1:]) if is_named else (path, ())
    if within and within[-1] in _SCALARS:
        within = within[:-1]
    names = [part for part in within if not _TAG.fullmatch(str(part))]
    return [part for part in (*names, *last) if part != "body"]


def _shortened(text: str) -> str:
    """Truncate a text, and escape lone surrogates, which JSON cannot carry."""
    short = text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
    return short.encode(errors="backslashreplace").decode()
