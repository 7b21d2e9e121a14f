"""Reads the JSON files beside a checkpoint. Torch-free."""

import json
from pathlib import Path
from typing import Any

from legato.core.errors import UnsupportedModelError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no such file.

    Raises:
        UnsupportedModelError: the file holds something else.
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
