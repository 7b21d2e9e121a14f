"""Which clients work with Legato, and in what?

    python -m benchmarks clients [--client openai] [--update] [--url http://127.0.0.1:8000]

Makes an environment for each client in the user's cache, with the current version from PyPI or npm
(`--update` makes it anew; programs, coding agents among them, have the version that is pinned),
starts a server with the default model, and one with room for the prompts of coding agents, runs
each client's script against its server, and writes docs/guides/clients.md. With `--client`, tries
some and prints; with `--url`, tries a server that runs already, whose model has the default one's
tokenizer. Exits with status 1 where something does not work that is not a client's own fault.
"""

import argparse
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx

from benchmarks.clients.catalog import CLIENTS, Client
from benchmarks.clients.environment import Environment
from benchmarks.clients.long_context import LONG_CONTEXT
from benchmarks.clients.page import Row, page
from benchmarks.clients.tokenizer import save_tokenizer
from benchmarks.clients.trial import Outcome, Target, outcomes
from benchmarks.runner.machine import Machine
from benchmarks.runner.main import main
from benchmarks.runner.run import Run
from benchmarks.runner.servers import SERVE, running_server

MINUTES = 30

_PAGE = Path(__file__).parents[2] / "docs" / "guides" / "clients.md"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--client", action="append", choices=CLIENTS, help="this one alone")
    parser.add_argument("--update", action="store_true", help="make the environments anew")
    parser.add_argument("--url", help="of a server that runs; else one is started")
    parser.add_argument(
        "--patience", type=int, default=120, metavar="SECONDS", help="for one capability"
    )


def measure(run: Run) -> int:
    clients = [CLIENTS[key] for key in run.flags.client or CLIENTS]
    agents = [client for client in clients if client.kind == "agent"]
    others = [client for client in clients if client.kind != "agent"]
    rows = [*_rows(run, others, SERVE), *_rows(run, agents, LONG_CONTEXT)]
    if not run.flags.client:
        _PAGE.write_text(page(rows, datetime.now(UTC).date(), Machine.here()), encoding="utf-8")
        run.tell(f"written to {_PAGE}")
    run.write({row.client.name: {"version": row.version, "outcomes": row.outcomes} for row in rows})
    return int(any(outcome.status == "failed" for row in rows for outcome in row.outcomes))


def _rows(run: Run, clients: Sequence[Client], command: str) -> list[Row]:
    """Try clients with one server."""
    if not clients:
        return []
    with tempfile.TemporaryDirectory() as folder, _server(run.flags.url, command) as url:
        target = _target(url, Path(folder))
        return [_row(run, client, target) for client in clients]


@contextmanager
def _server(url: str | None, command: str) -> Iterator[str]:
    if url:
        yield url.rstrip("/")
        return
    with running_server(command) as started:
        yield started


def _target(url: str, folder: Path) -> Target:
    model: str = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    save_tokenizer(folder)
    return Target(url, model, folder)


def _row(run: Run, client: Client, target: Target) -> Row:
    environment = Environment(client)
    with run.status(client.name) as status, tempfile.TemporaryDirectory() as folder:
        try:
            status.update(f"{client.name}: installing it")
            environment.make(run.flags.update)
        except subprocess.CalledProcessError as error:
            return Row(client, "", [Outcome("chat", "failed", f"not installed: {error.stderr}")])
        status.update(f"{client.name}: trying it")
        found = outcomes(environment.command(), target, run.flags.patience, Path(folder))
    row = Row(client, environment.version(), found)
    run.tell(f"{client.name} {row.version}: {_told(found)}")
    return row


def _told(found: Sequence[Outcome]) -> str:
    works = ", ".join(outcome.capability for outcome in found if outcome.status == "ok")
    others = [f"\n  {one.capability}: {one.message}" for one in found if one.status != "ok"]
    return works + "".join(others)


if __name__ == "__main__":
    main("clients")
