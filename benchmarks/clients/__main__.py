"""Which clients work with Legato, and in what?

    python -m benchmarks.clients [--client openai] [--update] [--url http://127.0.0.1:8000]

Makes an environment for each client in the user's cache, with the current version from PyPI or npm
(`--update` makes it anew), starts a server with the default model, runs each client's script
against it, and writes docs/guides/clients.md. With `--client`, tries some and prints; with `--url`,
tries a server that runs already, whose model has the default one's tokenizer. Exits with status 1
where something does not work that is not a client's own fault.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
from rich.console import Console

from benchmarks.clients.catalog import CLIENTS, Client
from benchmarks.clients.environment import Environment
from benchmarks.clients.page import Row, page
from benchmarks.clients.tokenizer import save_tokenizer
from benchmarks.clients.trial import Outcome, Target, outcomes
from benchmarks.servers import SERVE, running_server

_PAGE = Path(__file__).parents[2] / "docs" / "guides" / "clients.md"


def main() -> int:
    arguments = _parse()
    console = Console(stderr=True, highlight=False)
    clients = [CLIENTS[key] for key in arguments.client or CLIENTS]
    with tempfile.TemporaryDirectory() as folder, _server(arguments.url) as url:
        target = _target(url, Path(folder))
        rows = [_row(client, target, arguments, console) for client in clients]
    if not arguments.client:
        _PAGE.write_text(page(rows, datetime.now(UTC).date()), encoding="utf-8")
        console.print(f"written to {_PAGE}")
    return int(any(outcome.status == "failed" for row in rows for outcome in row.outcomes))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--client", action="append", choices=CLIENTS, help="this one alone")
    parser.add_argument("--update", action="store_true", help="make the environments anew")
    parser.add_argument("--url", help="of a server that runs; else one is started")
    parser.add_argument(
        "--patience", type=int, default=120, metavar="SECONDS", help="for one capability"
    )
    return parser.parse_args()


@contextmanager
def _server(url: str | None) -> Iterator[str]:
    if url:
        yield url.rstrip("/")
        return
    with running_server(SERVE) as started:
        yield started


def _target(url: str, folder: Path) -> Target:
    model: str = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    save_tokenizer(folder)
    return Target(url, model, folder)


def _row(client: Client, target: Target, arguments: argparse.Namespace, console: Console) -> Row:
    environment = Environment(client)
    with console.status(client.name) as status, tempfile.TemporaryDirectory() as folder:
        try:
            status.update(f"{client.name}: installing it")
            environment.make(arguments.update)
        except subprocess.CalledProcessError as error:
            return Row(client, "", [Outcome("chat", "failed", f"not installed: {error.stderr}")])
        status.update(f"{client.name}: trying it")
        found = outcomes(environment.command(), target, arguments.patience, Path(folder))
    row = Row(client, environment.version(), found)
    console.print(f"{client.name} {row.version}: {_told(found)}")
    return row


def _told(found: Sequence[Outcome]) -> str:
    works = ", ".join(outcome.capability for outcome in found if outcome.status == "ok")
    others = [f"\n  {one.capability}: {one.message}" for one in found if one.status != "ok"]
    return works + "".join(others)


if __name__ == "__main__":
    sys.exit(main())
