"""Error responses, also for FastAPI's and Starlette's errors."""

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from legato.api.http.anthropic_errors import anthropic_error, is_anthropic
from legato.api.http.errors import ApiError, as_api_error, first_problem, invalid_request
from legato.api.http.json_pieces import encode_json


class ErrorResponse(Response):
    """An error in the format of the API that its path belongs to."""

    def __init__(self, error: ApiError) -> None:
        self._error = error
        super().__init__(
            error.body, error.status, dict(error.headers or {}), media_type="application/json"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_anthropic(scope["path"]):
            self.body = encode_json(anthropic_error(self._error, scope["state"]["request_id"]))
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
