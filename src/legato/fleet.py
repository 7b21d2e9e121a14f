"""The documented path of a fleet's application, `legato.fleet:app`; legato-fleet has the rest."""

from importlib import import_module
from typing import Any

from legato.core.version import install_command


def __getattr__(name: str) -> Any:
    """Import `app` on first use: it needs legato-fleet and Ray."""
    if name != "app":
        raise AttributeError(name)
    try:
        return import_module("legato_fleet.front_door").app
    except ModuleNotFoundError as error:
        raise ImportError(f"a fleet is not installed: {install_command('fleet')}") from error
