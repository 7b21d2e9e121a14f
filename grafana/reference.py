"""The lists of docs/reference/metrics.md, made from the declarations of the metrics."""

import re
from pathlib import Path

from legato.core.stats import CacheInfo, EngineStats
from legato.observe.metrics.prefix import MetricsPrefix
from legato.observe.metrics.registry import Declaration
from legato.observe.metrics.server_metrics import ServerMetrics

FILE = Path(__file__).parents[1] / "docs" / "reference" / "metrics.md"

_LIST = re.compile(r"^## (.+)\n((?:(?!## ).*\n)*?)((?:- `.*\n)+)", re.MULTILINE)


def declared(prefix: MetricsPrefix = "legato") -> list[Declaration]:
    """All metrics of a server."""
    cache = CacheInfo(num_blocks=1, block_size=1, dtype="auto", enable_prefix_caching=True)
    return ServerMetrics(
        "", EngineStats, lambda: 0, cache=cache, classes={}, kept=dict, prefix=prefix
    ).declared


def text() -> str:
    """Return the reference as it is, but for the first list of each section."""
    sections: dict[str, list[str]] = {}  # key its heading, value its rows
    for metric in declared():
        sections.setdefault(metric.section, []).append(_row(metric))

    def renewed(found: re.Match[str]) -> str:
        heading, before, _ = found.groups()
        return f"## {heading}\n{before}{''.join(sections.pop(heading, [found[3]]))}"

    written = _LIST.sub(renewed, FILE.read_text(encoding="utf-8"))
    assert not sections, f"{FILE.name} has no lists for {', '.join(sections)}"
    return written


def _row(metric: Declaration) -> str:
    own = " *" if metric.is_own else ""
    labels = "".join(f", `{label}`" for label in metric.labels)
    return f"- `{metric.name}`{own} ({metric.kind}{labels}): {metric.text}\n"
