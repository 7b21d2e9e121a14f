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

_NOT_TRIED = "–"
_SIGNS = {"ok": "✓", "failed": "✗", "client": "(✗)"}
_MESSAGE_CHARS = 300

_INTRODUCTION = """# Which clients work?

Which clients work with Legato, and in what. `python -m benchmarks clients` writes this page: it
makes an environment for each client, installs the current version, and runs a script of
`benchmarks/clients/scripts/` in it against a server with the default model. A model of 135 million
parameters says little that is of use, so the scripts judge the protocol: whether an answer arrives,
is valid, ends as it was asked to, and reaches the program in the client's own classes.

Coding agents run as their users run them, against random weights of a small model with 32k tokens
of context: their own prompts have up to 20,000 tokens. A proxy between the two adds a
`tool_choice` and a schema to their requests, so that such a model calls the shell with a harmless
command, or says one sentence. Aider has no tools: it writes a file, and runs a command to test it.

Times to the first token are of the machine that wrote this page, busy or not: compare the two of a
row.

n8n and LibreChat are tried by the packages with which they call models.
[Open WebUI](chat-programs.md) and [Zed](zed.md) are not run: a test sends the requests that they
build.

✓ works · ✗ does not · (✗) does not, by the client's own fault · – the client has no such thing"""

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
    parts = [_INTRODUCTION, f"Legato {__version__}, {day.isoformat()}, on {machine}."]
    for kind, title, columns in _TABLES:
        of_kind = [row for row in rows if row.client.kind == kind]
        parts += [f"## {title}", _legend(columns), table(of_kind, columns, footnotes)]
    parts += footnotes
    return "\n\n".join(part for part in parts if part) + "\n"


def table(rows: Sequence[Row], columns: Mapping[str, str], footnotes: list[str]) -> str:
    """A row a client; what does not work is told in `footnotes`, to which this adds."""
    lines = [["client", "version", *columns], ["---"] * (2 + len(columns))]
    lines += [[row.client.name, row.version, *_cells(row, columns, footnotes)] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _legend(columns: Mapping[str, str]) -> str:
    return "\n".join(f"- **{name}**: {meaning}" for name, meaning in columns.items())


def _cells(row: Row, columns: Mapping[str, str], footnotes: list[str]) -> list[str]:
    found = {outcome.capability: outcome for outcome in row.outcomes}
    return [_cell(row, found.get(column), footnotes) for column in columns]


def _cell(row: Row, outcome: Outcome | None, footnotes: list[str]) -> str:
    if outcome is None:
        return _NOT_TRIED
    sign = _SIGNS[outcome.status]
    if outcome.status == "ok":
        return outcome.message or sign
    said = html.escape(" ".join(outcome.message.split())[:_MESSAGE_CHARS], quote=False)
    footnotes.append(f"[^{len(footnotes) + 1}]: {row.client.name}, {outcome.capability}: {said}")
    return f"{sign}[^{len(footnotes)}]"
