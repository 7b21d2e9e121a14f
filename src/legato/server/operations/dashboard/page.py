"""The dashboard's page, to which the server's root leads."""

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import RedirectResponse

from legato.server.operations.pages import Asset, asset

PAGE = "/dashboard"
ROOT = "/"

_INDEX = "index.html"

router = APIRouter(include_in_schema=False)


def load_dashboard() -> dict[str, Asset]:
    """The page and what it loads; key the path of its URL."""
    assets = {}
    for file in files(__package__).joinpath("static").iterdir():
        path = PAGE if file.name == _INDEX else f"{PAGE}/{file.name}"
        assets[path] = asset(file)
    return assets


@router.get(ROOT)
async def root() -> RedirectResponse:
    # Relative, for a proxy may serve it under a path of its own.
    return RedirectResponse(PAGE.removeprefix("/"))
