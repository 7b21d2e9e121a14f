"""All figures on one page."""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.gpu.figures import Figures, section
from benchmarks.gpu.runner import PARTS
from benchmarks.gpu.settings import Settings
from legato.core.version import __version__

_INTRODUCTION = """# Legato on a GPU

Written by `python -m benchmarks.gpu`. Weights are random ones of the shape *{model}*. A ratio
is how many times slower something is than the roofline allows: 1 cannot be beaten.

Legato {version}."""


def page(settings: Settings, found: Mapping[str, Figures]) -> str:
    """In Markdown; key of `found` the part."""
    begun = _INTRODUCTION.format(model=Path(settings.model).name, version=__version__)
    missing = [part for part in PARTS if part not in found]
    parts = [begun, *map(section, found.values())]
    if missing:
        parts.append(f"Not measured yet: {', '.join(missing)}.")
    return "\n\n".join(parts) + "\n"
