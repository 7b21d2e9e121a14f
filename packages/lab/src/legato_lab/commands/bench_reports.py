"""Writes a benchmark's report where its flags say."""

import argparse
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from legato_lab.report.report_file import Report

_NOT_SETTINGS = {"run", "benchmark", "api_key", "name", "output", "resume"}
_UNSAFE_IN_NAMES = re.compile(r"[^\w.-]+")


def publish(args: argparse.Namespace, report: "Report") -> None:
    """Write the report as JSON and as a page, and print it."""
    from legato.cli.table import print_table
    from legato_lab.report.page import render_page
    from legato_lab.report.report_file import write_report
    from legato_lab.report.tables import tables

    path = report_path(args, report.name)
    write_report(path, report)
    for table in tables([report]):
        print_table(table)
    path.with_suffix(".html").write_text(render_page([report]), encoding="utf-8")
    print(f"written to {path} and {path.with_suffix('.html').name}")


def report_path(args: argparse.Namespace, name: str) -> Path:
    """Return the path of a report's JSON file."""
    kind = args.benchmark.__name__.strip("_")
    path: Path = args.output / _UNSAFE_IN_NAMES.sub("-", f"{kind}-{name}.json")
    return path


def report_settings(
    args: argparse.Namespace, left_out: Collection[str] = _NOT_SETTINGS
) -> dict[str, Any]:
    """Return the settings for a report; key a flag's name."""
    return {key: value for key, value in vars(args).items() if key not in left_out}
