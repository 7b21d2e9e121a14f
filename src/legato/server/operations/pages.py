"""Static files for browsers; they reveal nothing about the server."""

from importlib.resources.abc import Traversable
from pathlib import PurePath

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # No external resources, nothing inline but pictures, and no framing by other pages.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Asset(msgspec.Struct, frozen=True):
    """A static file."""

    content: bytes
    media_type: str


def asset(file: Traversable) -> Asset:
    return Asset(file.read_bytes(), _MEDIA_TYPES[PurePath(file.name).suffix])


def pages_router(assets: dict[str, Asset]) -> APIRouter:
    """Serve static files, outside the documented API.

    Args:
        assets: key the path of the URL.
    """
    router = APIRouter(include_in_schema=False)

    async def serve(request: Request) -> Response:
        asset = assets[request.scope["path"]]
        return Response(asset.content, media_type=asset.media_type, headers=_HEADERS)

    for path in assets:
        router.add_api_route(path, serve, methods=["GET", "HEAD"])
    return router
