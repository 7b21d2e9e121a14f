"""The table of architectures, which `legato models` prints, too."""

from collections.abc import Callable, Mapping

from legato.cli.model_table import architecture_rows
from scripts.api_reference.markdown import table


def parts() -> Mapping[str, Callable[[], str]]:
    return {"architectures": _architectures}


def _architectures() -> str:
    rows = [
        [f"`{row.architecture}`", f"`{row.model_type}`", row.native or "yes", row.gpu or "yes"]
        for row in architecture_rows()
    ]
    return table(["architecture", "model type", "native CPU layers", "GPU layers"], rows)
