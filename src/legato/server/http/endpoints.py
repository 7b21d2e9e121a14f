"""Other names of endpoints, and errors for endpoints that do not exist."""

from collections.abc import Iterable
from http import HTTPStatus

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from legato.core.spelling import did_you_mean
from legato.server.http.errors import ApiError, invalid_request

_VERSIONED = ("/chat/completions", "/completions", "/messages", "/models", "/responses")
_VERSION = "/v1"


class AddVersion:
    """Takes paths without `/v1` for the same with it, as llama.cpp does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if any(path == one or path.startswith(f"{one}/") for one in _VERSIONED):
            scope["path"] = _VERSION + path
        await self._app(scope, receive, send)


def allowed_methods(scope: Scope, routes: Iterable[BaseRoute]) -> list[str]:
    """Return the methods that a request's path takes, in order; empty if it is no endpoint."""
    taking = [route for route in routes if route.matches(scope)[0] is not Match.NONE]
    return sorted(
        {one for route in taking if isinstance(route, Route) for one in route.methods or ()}
    )


def no_such_endpoint(scope: Scope, routes: Iterable[BaseRoute]) -> ApiError:
    """Args: scope: of a request that no route takes."""
    method, path = scope["method"], scope["path"]
    known = [route for route in routes if isinstance(route, Route)]
    if allowed := allowed_methods(scope, known):
        told = ", ".join(allowed)
        message = f"{path} does not take {method}, but {told}"
        return invalid_request(message, HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": told})
    told = did_you_mean(path, (route.path for route in known if route.include_in_schema))
    return invalid_request(f"no such endpoint: {method} {path}{told}", HTTPStatus.NOT_FOUND)
