"""Reads a checkpoint's JSON files. Torch-free."""

import json
from pathlib import Path
from typing import Any

from legato.core.errors import UnsupportedModelError

_MAX_BYTES = 2**26
"""Of a file; the largest index of shards that is published has a third of it."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file does not exist.

    Raises:
        UnsupportedModelError: the file is not a JSON object, or too large for one.
    """
    if not path.is_file():
        return {}
    if (num_bytes := path.stat().st_size) > _MAX_BYTES:
        raise UnsupportedModelError(
            f"cannot read {path}: it has {num_bytes:,} bytes, of {_MAX_BYTES:,} at most"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{path} does not hold a JSON object")
    return value
