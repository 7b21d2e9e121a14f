"""The reference's page and its files: Swagger UI from a Python package, not from a CDN."""

from importlib.resources import files

from legato.server.operations.pages import Asset, asset

PAGE = "/docs"

_INDEX = "index.html"
_SHIPPED_BY = "fastapi_offline"
_SHIPPED = ("swagger-ui-bundle.js", "swagger-ui.css")


def load_reference() -> dict[str, Asset]:
    """Load the page and its files; key the path of the URL."""
    own = files(__package__).joinpath("static")
    shipped = files(_SHIPPED_BY).joinpath("static")
    scripts = [own.joinpath("reference.js"), *map(shipped.joinpath, _SHIPPED)]
    return {
        PAGE: asset(own.joinpath(_INDEX)),
        **{f"{PAGE}/{file.name}": asset(file) for file in scripts},
    }
