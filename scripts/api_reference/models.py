"""Lists of architectures: what `legato models` prints, and what transformers' layers run."""

from collections.abc import Callable, Mapping

from legato.cli.model_table import architecture_rows
from legato.model.architectures import ARCHITECTURES
from legato.model.transformers_families import FAMILIES
from scripts.api_reference.markdown import code, items


def parts() -> Mapping[str, Callable[[], str]]:
    return {"architectures": _architectures, "transformers": _transformers}


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
