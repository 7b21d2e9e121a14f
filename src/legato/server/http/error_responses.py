"""Errors as responses, those of FastAPI and Starlette among them."""

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from legato.server.http.errors import as_api_error, first_problem, invalid_request


def error_response(error: Exception) -> Response:
    api_error = as_api_error(_own(error))
    headers = dict(api_error.headers or {})
    return Response(api_error.body, api_error.status, headers, media_type="application/json")


def _own(error: Exception) -> Exception:
    match error:
        case RequestValidationError():
            return first_problem(error.errors())
        case HTTPException():
            return invalid_request(str(error.detail), error.status_code, error.headers)
    return error
