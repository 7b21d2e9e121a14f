"""Lists of architectures: what `legato models` prints, and what transformers' layers run."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from legato.cli.model_table import architecture_rows
from legato.core.errors import UnsupportedModelError
from legato.model.architectures import ARCHITECTURES
from legato.model.transformers_families import FAMILIES, runs_on_transformers
from legato.model.wrappers import WRAPPERS
from scripts.api_reference.markdown import code, items

_PUBLISHED = Path(__file__).parents[2] / "tests" / "published" / "checkpoints.json"


def parts() -> Mapping[str, Callable[[], str]]:
    return {
        "architectures": _architectures,
        "transformers": _transformers,
        "wrappers": _wrappers,
        "published": _published,
    }


def _architectures() -> str:
    """Return the architectures with their model types, by the layers that run them."""
    groups: dict[str, list[str]] = {}
    for row in architecture_rows():
        name = f"{code(row.architecture)} ({code(row.model_type)})"
        groups.setdefault(_layers(row.native, row.gpu), []).append(name)
    return items((layers, ", ".join(names)) for layers, names in groups.items())


def _layers(native: str, gpu: str) -> str:
    """Return which layers run an architecture; the reasons of others are in parentheses."""
    on_gpu = f"no GPU layers ({gpu})" if gpu else "GPU layers"
    if native == "partly":
        return f"Native CPU layers in part, {on_gpu}"
    return f"{f'No native CPU layers ({native})' if native else 'Native CPU layers'}, {on_gpu}"


def _transformers() -> str:
    """Return the architectures that only transformers' layers run."""
    return ", ".join(
        f"{code(name)} ({code(kind)})"
        for kind, name in FAMILIES.items()
        if name not in ARCHITECTURES
    )


def _wrappers() -> str:
    """Return the classes whose text model runs alone."""
    return ", ".join(map(code, WRAPPERS))


def _published() -> str:
    """Return the published checkpoints whose tiny copies load, and why others do not."""
    layouts = json.loads(_PUBLISHED.read_text(encoding="utf-8"))
    groups: dict[str, list[str]] = {}
    for layout in layouts:
        names = [*layout.get("recipes", ()), *layout.get("others", ())]
        groups.setdefault(_refusal(layout) or "Loads", []).extend(names)
    return items((reason, ", ".join(names)) for reason, names in groups.items())


def _refusal(layout: Mapping[str, Any]) -> str:
    """Return why no checkpoint of a layout loads; empty if one does."""
    if "type" not in layout or "model" in layout:
        return ""
    contents = {"architectures": [layout["class"]], "model_type": layout["type"]}
    try:
        runs_on_transformers(Path(), contents, "auto")
    except UnsupportedModelError as error:
        reason = str(error).partition(": ")[2].removesuffix(" (config.json)")
        return f"Refused: {reason}"
    return ""
