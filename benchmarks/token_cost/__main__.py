"""What does a token cost outside the model, in processor time of HTTP server and engine?

    python -m benchmarks token_cost [--streams 64] [--rounds 3] [--against CHECKOUT] ...

A server whose model computes nothing, though its steps last as if it did, sends tokens to streams
that one other process reads. What is counted is the processor time that the server's processes
take, user's and system's, from when all streams run. With `--against`, windows alternate with those
of another checkout's server: only the ratio of both is to be trusted on a machine that is not idle.
"""

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil

from benchmarks.runner.checkout import HERE, environment
from benchmarks.runner.flags import add_rounds
from benchmarks.runner.main import main
from benchmarks.runner.rounds import in_turn
from benchmarks.runner.run import Run
from benchmarks.token_cost.client import REQUESTS, Streams
from legato.cli.table import Table
from legato_lab.load.local_server import local_server

MINUTES = 2

_ENGINE = "benchmarks.token_cost.engine"


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


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", nargs="+", choices=REQUESTS, default=list(REQUESTS))
    add_rounds(parser, 3, "--windows", help="of each server and kind")
    parser.add_argument("--window-s", type=float, default=4.0, help="how long each lasts")
    parser.add_argument("--step-s", type=float, default=0.02, help="how long a step lasts")
    parser.add_argument("--against", type=Path, help="another checkout to compare with")


def measure(run: Run) -> None:
    flags = run.flags
    checkouts = [("this", HERE)]
    if flags.against is not None:
        checkouts.append((str(flags.against), flags.against))
    with ExitStack() as stack, run.status("starting") as status:
        servers = [stack.enter_context(_running(name, path, run)) for name, path in checkouts]
        status.update("measuring")
        asyncio.run(_measure(servers, flags))
    run.show(_table(servers, flags.requests))
    if len(servers) > 1:
        for kind in flags.requests:
            ratio = _ratio(servers, kind)
            run.console.print(f"{kind}: {ratio:.2f} of the other's HTTP time a token")
    run.write({server.name: server.costs for server in servers})


@contextmanager
def _running(name: str, checkout: Path, run: Run) -> Iterator[Server]:
    module = "benchmarks.token_cost.server"
    step_s = str(run.flags.step_s)
    serve = [sys.executable, "-m", module, step_s, "serve", "--port", "{port}"]
    # The package of that checkout, driven by the programs of this one.
    path = environment(checkout, run.flags.out)["PYTHONPATH"]
    command = ["env", f"PYTHONPATH={path}", *serve, "--log-level", "warning"]
    with local_server(command, subprocess.DEVNULL) as (process, url):
        yield Server(name, psutil.Process(process.pid), urlsplit(url).port or 0)


async def _measure(servers: Sequence[Server], flags: argparse.Namespace) -> None:
    for number in range(flags.rounds):
        for kind in flags.requests:
            for server in in_turn(servers, number):
                await server.measure(kind, flags.streams, flags.window_s)


def _table(servers: Sequence[Server], kinds: Sequence[str]) -> Table:
    header = ["checkout", "requests", "HTTP", "user", "system", "engine"]
    rows = [_row(server, kind) for server in servers for kind in kinds]
    return Table("Microseconds of processor time a token", header, rows)


def _row(server: Server, kind: str) -> list[str]:
    cost = server.mean(kind)
    figures_us = (cost.http, cost.http_user, cost.http_system, cost.engine)
    return [server.name, kind, *(f"{us:.1f}" for us in figures_us)]


def _ratio(servers: Sequence[Server], kind: str) -> float:
    this, other = (server.mean(kind).http for server in servers)
    return this / other


if __name__ == "__main__":
    main("token_cost")
