"""Floor 10: several engines served as one, on Ray Serve."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import `app` on first use: it needs Ray."""
    if name == "app":
        from legato_fleet.front_door import app

        return app
    raise AttributeError(name)
