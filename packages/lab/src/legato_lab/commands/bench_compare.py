"""`legato bench compare`: two runs, and their differences in percent."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from legato.core.errors import ConfigError

if TYPE_CHECKING:
    from legato_lab.report.report_file import Report, RunReport


def add_compare_parser(benchmarks: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = benchmarks.add_parser(
        "compare",
        help="differences of two runs, in percent",
        description="Compare the figures of two runs, or of two sweeps load by load, measured or "
        "simulated: by how much the second differs from the first, and whether that is more than "
        "the noise between requests.",
    )
    for name in ("first", "second"):
        parser.add_argument(name, type=Path, metavar="JSON")
    parser.add_argument(
        "-o", "--output", type=Path, default="compare.html", metavar="HTML", help="%(default)s"
    )
    parser.set_defaults(benchmark=_compare)


def _compare(args: argparse.Namespace) -> None:
    from legato.cli.table import print_table
    from legato_lab.comparison import compare, unlike_requests, unlike_settings
    from legato_lab.report.comparison_tables import comparison_table, unlike_table
    from legato_lab.report.page import render
    from legato_lab.report.plots import plots
    from legato_lab.report.report_file import read_report
    from legato_lab.report.sweep_plots import sweep_plots

    first, second = read_report(args.first), read_report(args.second)
    names = (first.name, second.name)
    if first.name == second.name:
        names = (str(args.first), str(args.second))
    tables, differing = [], unlike_settings(first, second)
    for title, one, other in _pairs(first, second):
        tables.append(comparison_table(title, names, compare(one, other)))
        differing += unlike_requests(one, other, title)
    if differing:
        told = ", ".join(difference.name for difference in differing)
        print(f"legato: the two are not alike in: {told}", file=sys.stderr)
        tables.append(unlike_table(names, differing))
    for table in tables:
        print_table(table)
    drawn = [*plots([first, second]), *sweep_plots([first, second])]
    texts = [(f"Settings: {report.name}", report.settings) for report in (first, second)]
    args.output.write_text(render("legato bench compare", tables, drawn, texts), encoding="utf-8")
    print(f"written to {args.output}")


def _pairs(first: "Report", second: "Report") -> "list[tuple[str, RunReport, RunReport]]":
    """Return the runs to compare, with a title for each comparison.

    Raises:
        ConfigError: there are none.
    """
    from legato_lab.report.report_file import RunReport, SweepReport

    match first, second:
        case RunReport(), RunReport():
            return [("Comparison", first, second)]
        case SweepReport(), SweepReport() if first.load_kind is second.load_kind:
            others = {point.load: point.run for point in second.points}
            common = [point for point in first.points if point.load in others]
            if common:
                names = [f"Comparison: {first.load_kind.describe(point.load)}" for point in common]
                runs = [(point.run, others[point.load]) for point in common]
                return [(name, *pair) for name, pair in zip(names, runs, strict=True)]
            raise ConfigError("the two sweeps have no load in common")
    raise ConfigError("compare takes two runs, or two sweeps over the same kind of load")
