"""Errors for endpoints that do not exist."""

from collections.abc import Iterable
from http import HTTPStatus

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from legato.core.spelling import did_you_mean
from legato.server.http.errors import ApiError, invalid_request


def no_such_endpoint(scope: Scope, routes: Iterable[BaseRoute]) -> ApiError:
    """Args: scope: of a request that no route takes."""
    method, path = scope["method"], scope["path"]
    known = [route for route in routes if isinstance(route, Route)]
    allowed = {
        allowed
        for route in known
        if route.matches(scope)[0] is not Match.NONE
        for allowed in route.methods or ()
    }
    if allowed:
        told = ", ".join(sorted(allowed))
        message = f"{path} does not take {method}, but {told}"
        return invalid_request(message, HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": told})
    told = did_you_mean(path, (route.path for route in known if route.include_in_schema))
    return invalid_request(f"no such endpoint: {method} {path}{told}", HTTPStatus.NOT_FOUND)
