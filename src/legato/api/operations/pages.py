"""The pages for browsers: chat, dashboard and reference; they reveal nothing about the server."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePath

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

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
    "Vary": "Accept",  # people and programs get different answers at the root
}

CHAT, DASHBOARD, REFERENCE, ROOT = "/chat", "/dashboard", "/docs", "/"
"""Paths of the pages, or of the files of the chat, whose page is the root."""
_INDEX = "index.html"
_SHIPPED_BY = "fastapi_offline"
_SHIPPED = ("swagger-ui-bundle.js", "swagger-ui.css")

_OLLAMA = "Ollama is running"


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
        path = request.scope["path"]
        if path == ROOT and "text/html" not in request.headers.get("Accept", ""):
            # Programs ask whether there is an Ollama.
            return PlainTextResponse(_OLLAMA, headers=_HEADERS)
        asset = assets[path]
        return Response(asset.content, media_type=asset.media_type, headers=_HEADERS)

    for path in assets:
        router.add_api_route(path, serve, methods=["GET", "HEAD"])
    return router


def load_chat() -> dict[str, Asset]:
    """Load the page with a chat and its files; key the path of the URL."""
    return _load("chat", ROOT, CHAT)


def load_dashboard() -> dict[str, Asset]:
    """Load the dashboard and its files; key the path of the URL."""
    return _load("dashboard", DASHBOARD, DASHBOARD)


def _load(folder: str, page: str, below: str) -> dict[str, Asset]:
    return {
        page if file.name == _INDEX else f"{below}/{file.name}": asset(file)
        for file in files(__package__).joinpath(folder, "static").iterdir()
    }


def load_reference() -> dict[str, Asset]:
    """Load the API's reference and its files; key the path of the URL.

    Swagger UI is from a Python package, not from a CDN.
    """
    own = files(__package__).joinpath("reference", "static")
    shipped = files(_SHIPPED_BY).joinpath("static")
    scripts = [own.joinpath("reference.js"), *map(shipped.joinpath, _SHIPPED)]
    return {
        REFERENCE: asset(own.joinpath(_INDEX)),
        **{f"{REFERENCE}/{file.name}": asset(file) for file in scripts},
    }
