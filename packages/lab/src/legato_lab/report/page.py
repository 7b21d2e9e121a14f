"""Renders tables and plots as one self-contained page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from legato.cli.table import Table
from legato_lab.report.plots import plots
from legato_lab.report.report_file import Report
from legato_lab.report.sweep_plots import sweep_plots
from legato_lab.report.tables import tables

_TEMPLATE = Path(__file__).with_name("page.html")


def render_page(reports: Sequence[Report]) -> str:
    """Render the tables, the plots and the settings of reports as HTML."""
    title = "legato bench: " + ", ".join(report.name for report in reports)
    # A list, not a dict: two reports may have the same name.
    settings = [(f"Settings: {report.name}", report.settings) for report in reports]
    return render(title, tables(reports), [*plots(reports), *sweep_plots(reports)], settings)


def render(
    title: str,
    tables: Sequence[Table],
    plots: Sequence[str],
    texts: Sequence[tuple[str, dict[str, Any]]],
) -> str:
    """Render a page.

    Args:
        plots: SVG elements.
        texts: headings, and the texts below each; key a text's name.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(title=title, tables=tables, plots=plots, texts=texts)
