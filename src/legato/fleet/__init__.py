"""Floor 10: several engines that are served as one, on Ray Serve."""

from typing import Any


def __getattr__(name: str) -> Any:
    """`app`, which is imported where it is asked for: it takes Ray."""
    if name == "app":
        from legato.fleet.front_door import app

        return app
    raise AttributeError(name)
