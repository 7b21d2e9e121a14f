"""docs/guides/clients.md: what each client can do."""

import html
from collections.abc import Mapping, Sequence
from datetime import date

import msgspec

from benchmarks.clients.capabilities import AGENT, BENCHMARK, LIBRARY
from benchmarks.clients.catalog import Client, Kind
from benchmarks.clients.trial import Outcome
from benchmarks.runner.machine import Machine
from legato.core.version import __version__

_SIGNS = {"failed": "✗", "client": "(✗)"}
_MESSAGE_CHARS = 300

_INTRODUCTION = """# Which clients work?

Every client of these tables does all that stands below its table, but for what its row names: ✗
fails, (✗) fails by the client's own fault, and "lacks" is what the client itself does not have."""

_METHOD = """## How was that tried?

`python -m benchmarks clients` writes this page. It installs the current version of each client, and
runs a script of `benchmarks/clients/scripts/` with it against a server with the default model. n8n
and LibreChat are tried by the packages with which they call models. For
[Open WebUI](chat-programs.md) and [Zed](zed.md), a test sends the requests that they build.

Coding agents run whole, against random weights of a small model with 32k tokens of context. A proxy
adds a `tool_choice` and a schema to their requests, so that the model calls the shell. Aider has no
tools: it writes a file, and runs a command to test it. Compare the two times of a row."""

_TABLES: tuple[tuple[Kind, str, Mapping[str, str]], ...] = (
    ("library", "Libraries", LIBRARY),
    ("agent", "Coding agents", AGENT),
    ("benchmark", "Benchmarks and evaluations", BENCHMARK),
)


class Row(msgspec.Struct, frozen=True):
    """A client, the version that was tried, and how it went."""

    client: Client
    version: str
    outcomes: Sequence[Outcome]


def page(rows: Sequence[Row], day: date, machine: Machine) -> str:
    """The whole of it."""
    footnotes: list[str] = []
    parts = [_INTRODUCTION]
    for kind, title, columns in _TABLES:
        of_kind = [row for row in rows if row.client.kind == kind]
        parts += [f"## {title}", table(of_kind, columns, footnotes), _legend(columns)]
    parts += [_METHOD, f"Legato {__version__}, {day.isoformat()}, on {machine}.", *footnotes]
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[Row], columns: Mapping[str, str], footnotes: list[str]) -> str:
    """A row a client; adds the reason of each failure to `footnotes`.

    A capability with figures has a column of its own.
    """
    figures = [
        name
        for name in columns
        if any(one.capability == name and _has_figure(one) for row in rows for one in row.outcomes)
    ]
    lines = [["client", "version", "✗", "lacks", *figures], ["---"] * (4 + len(figures))]
    for row in rows:
        tried = {outcome.capability for outcome in row.outcomes}
        failed = [_failure(row, one, footnotes) for one in row.outcomes if one.status != "ok"]
        lacking = [name for name in columns if name not in tried]
        shown = {one.capability: one.message for one in row.outcomes if _has_figure(one)}
        cells = [shown.get(name, "") for name in figures]
        lines.append([row.client.name, row.version, ", ".join(failed), ", ".join(lacking), *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _legend(columns: Mapping[str, str]) -> str:
    return "\n".join(f"- **{name}**: {meaning}" for name, meaning in columns.items())


def _has_figure(outcome: Outcome) -> bool:
    return outcome.status == "ok" and bool(outcome.message)


def _failure(row: Row, outcome: Outcome, footnotes: list[str]) -> str:
    said = html.escape(" ".join(outcome.message.split())[:_MESSAGE_CHARS], quote=False)
    footnotes.append(f"[^{len(footnotes) + 1}]: {row.client.name}, {outcome.capability}: {said}")
    return f"{_SIGNS[outcome.status]} {outcome.capability}[^{len(footnotes)}]"
