"""Reads a checkpoint's JSON files. Torch-free."""

import json
from pathlib import Path
from typing import Any

from legato.core.errors import UnsupportedModelError


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file does not exist.

    Raises:
        UnsupportedModelError: the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{path} does not hold a JSON object")
    return value
