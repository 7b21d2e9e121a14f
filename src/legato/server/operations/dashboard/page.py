"""The dashboard's page; the server's root redirects to it."""

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import RedirectResponse

from legato.server.operations.pages import Asset, asset

PAGE = "/dashboard"
ROOT = "/"

_INDEX = "index.html"

router = APIRouter(include_in_schema=False)


def load_dashboard() -> dict[str, Asset]:
    """Load the page and its files; key the path of the URL."""
    assets = {}
    for file in files(__package__).joinpath("static").iterdir():
        path = PAGE if file.name == _INDEX else f"{PAGE}/{file.name}"
        assets[path] = asset(file)
    return assets


@router.head(ROOT)
@router.get(ROOT)
async def root() -> RedirectResponse:
    # A relative URL, since a proxy may serve the server under a path of its own.
    return RedirectResponse(PAGE.removeprefix("/"))
