"""Tables of architectures: what `legato models` prints, and what transformers' layers run."""

from collections.abc import Callable, Mapping

from legato.cli.model_table import architecture_rows
from legato.model.architectures import ARCHITECTURES
from legato.model.transformers_families import FAMILIES
from scripts.api_reference.markdown import table


def parts() -> Mapping[str, Callable[[], str]]:
    return {"architectures": _architectures, "transformers": _transformers}


def _architectures() -> str:
    rows = [
        [f"`{row.architecture}`", f"`{row.model_type}`", row.native or "yes", row.gpu or "yes"]
        for row in architecture_rows()
    ]
    return table(["architecture", "model type", "native CPU layers", "GPU layers"], rows)


def _transformers() -> str:
    """Return the architectures that only transformers' layers run."""
    rows = [
        [f"`{name}`", f"`{kind}`"] for kind, name in FAMILIES.items() if name not in ARCHITECTURES
    ]
    return table(["architecture", "model type"], rows)
