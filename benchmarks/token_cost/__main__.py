"""What a token costs outside the model: processor time of the HTTP server and of the engine.

    python -m benchmarks.token_cost [--streams 64] [--windows 3] [--against CHECKOUT] ...

A server whose model computes nothing, though its steps last as if it did, sends tokens to streams
that one other process reads. What is counted is the processor time that the server's processes
take, user's and system's, from when all streams run. With `--against`, windows alternate with those
of another checkout's server: only the ratio of both is to be trusted on a machine that is not idle.
"""

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.token_cost.client import REQUESTS, Streams
from legato.lab.load.local_server import local_server

_ENGINE = "benchmarks.token_cost.engine"
_HERE = Path(__file__).parents[2]


class Cost(msgspec.Struct, frozen=True):
    """Microseconds of processor time a token, of the HTTP server's process and the engine's."""

    http_user: float
    http_system: float
    engine: float

    @property
    def http(self) -> float:
        return self.http_user + self.http_system


class Server:
    """A server of one checkout, and what was measured of it; key one of `REQUESTS`."""

    def __init__(self, name: str, http: psutil.Process, port: int) -> None:
        self.name = name
        self.costs: dict[str, list[Cost]] = {kind: [] for kind in REQUESTS}
        self._http = http
        self._port = port
        children = http.children()
        [self._engine] = [child for child in children if _ENGINE in child.cmdline()]

    async def measure(self, kind: str, num_streams: int, window_s: float) -> None:
        async with Streams(self._port, kind, num_streams) as streams:
            num_before, before = streams.num_tokens, self._cpu_s()
            await asyncio.sleep(window_s)
            num_tokens = streams.num_tokens - num_before
            spent_s = [end - begin for begin, end in zip(before, self._cpu_s(), strict=True)]
        self.costs[kind].append(Cost(*(1e6 * seconds / num_tokens for seconds in spent_s)))

    def mean(self, kind: str) -> Cost:
        costs = self.costs[kind]
        fields = zip(*map(msgspec.structs.astuple, costs), strict=True)
        return Cost(*(sum(values) / len(costs) for values in fields))

    def _cpu_s(self) -> tuple[float, float, float]:
        http, engine = self._http.cpu_times(), self._engine.cpu_times()
        return http.user, http.system, engine.user + engine.system


def main() -> None:
    arguments = _parse()
    console = Console(highlight=False)
    checkouts = [("this", _HERE)]
    if arguments.against is not None:
        checkouts.append((str(arguments.against), arguments.against))
    with ExitStack() as stack:
        servers = [
            stack.enter_context(_running(name, path, arguments.step_s)) for name, path in checkouts
        ]
        asyncio.run(_measure(servers, arguments))
    console.print(_table(servers, arguments.requests), "Microseconds of processor time a token.")
    if len(servers) > 1:
        for kind in arguments.requests:
            console.print(f"{kind}: {_ratio(servers, kind):.2f} of the other's HTTP time a token")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", nargs="+", choices=REQUESTS, default=list(REQUESTS))
    parser.add_argument("--windows", type=int, default=3, help="of each server and kind")
    parser.add_argument("--window-s", type=float, default=4.0, help="how long each lasts")
    parser.add_argument("--step-s", type=float, default=0.02, help="how long a step lasts")
    parser.add_argument("--against", type=Path, help="another checkout to compare with")
    return parser.parse_args()


@contextmanager
def _running(name: str, checkout: Path, step_s: float) -> Iterator[Server]:
    module = "benchmarks.token_cost.server"
    serve = [sys.executable, "-m", module, str(step_s), "serve", "--port", "{port}"]
    # The package of that checkout, driven by the programs of this one.
    path = os.pathsep.join((str(checkout.resolve() / "src"), str(_HERE)))
    command = ["env", f"PYTHONPATH={path}", *serve, "--log-level", "warning"]
    with local_server(command, subprocess.DEVNULL) as (process, url):
        yield Server(name, psutil.Process(process.pid), urlsplit(url).port or 0)


async def _measure(servers: Sequence[Server], arguments: argparse.Namespace) -> None:
    for window in range(arguments.windows):
        for kind in arguments.requests:
            for server in servers[:: 1 if window % 2 else -1]:
                await server.measure(kind, arguments.streams, arguments.window_s)


def _table(servers: Sequence[Server], kinds: Sequence[str]) -> Table:
    table = Table("checkout", "requests", "HTTP", "user", "system", "engine")
    for server in servers:
        for kind in kinds:
            cost = server.mean(kind)
            figures = (cost.http, cost.http_user, cost.http_system, cost.engine)
            table.add_row(server.name, kind, *(f"{us:.1f}" for us in figures))
    return table


def _ratio(servers: Sequence[Server], kind: str) -> float:
    this, other = (server.mean(kind).http for server in servers)
    return this / other


if __name__ == "__main__":
    main()
