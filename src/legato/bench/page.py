"""Any number of reports side by side, as one page that needs nothing else."""

from collections.abc import Sequence
from pathlib import Path

import jinja2

from legato.bench.plots import plots
from legato.bench.report import Report
from legato.bench.tables import tables

_TEMPLATE = Path(__file__).with_name("page.html")


def render_page(reports: Sequence[Report]) -> str:
    """The tables, the plots and the settings as HTML."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(reports=reports, tables=tables(reports), plots=plots(reports))
