"""What is speculation worth where answers copy from prompts, and where nothing can be guessed?

    python -m benchmarks speculation [--workloads edits conversations random mixed]
                                     [--streams 1 4 16 64] [--sides off auto 4] [--itl-slo 100ms]
                                     [--rounds 1] [--peer 'NAME=MODEL=COMMAND with {port}' ...]

Starts a server for each side, which is what `--speculative` is, and keeps them all running. They
take turns round by round: the same streams ask each of them the same, and no two rounds ask alike.
Prompts are computed before a round is measured, but for their last, partial blocks. Ratios are to
the first side in the same round. Rounds are written to speculation.jsonl as they end, with which a
second run goes on.
"""

import argparse
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import msgspec
import psutil

from benchmarks.runner.flags import add_peers
from benchmarks.runner.main import main
from benchmarks.runner.rounds import in_turn
from benchmarks.runner.run import Run
from benchmarks.runner.servers import SERVE, Server, server_process, servers
from benchmarks.speculation.client import Client, Figures
from benchmarks.speculation.report import plot, table
from benchmarks.speculation.rounds import (
    Measured,
    Round,
    append,
    measured_before,
    plan,
    speed_ups,
)
from benchmarks.speculation.workloads import MIXED, WORKLOADS, Chat
from legato.core.errors import ConfigError

MINUTES = 40

_CACHE = "2G"
"""Of each of Legato's sides, taken when it starts: more than a run fills, as all of them run."""
_WARM_UP_STREAMS = (1, 4, 16)


class Side:
    """A server that runs, and the time that its processes have taken."""

    def __init__(self, client: Client, pid: int) -> None:
        self.client = client
        self._process = psutil.Process(pid)

    def cpu_s(self) -> float:
        processes = [self._process, *self._process.children(recursive=True)]
        return sum(_cpu_s(process) for process in processes)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS, MIXED], default=[*WORKLOADS])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--sides", nargs="+", default=["off", "auto", "4"], metavar="auto|off|K")
    parser.add_argument("--itl-slo", metavar="DURATION", help="that Legato's sides promise")
    parser.add_argument("--rounds", type=float, default=1.0, help="times the usual number of them")
    add_peers(parser)


def measure(run: Run) -> None:
    flags = run.flags
    sides = _servers(flags)
    path = run.path(".jsonl")
    try:
        rounds = plan(flags.workloads, flags.streams, flags.rounds)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    wanted = {one.key for one in rounds}
    before = measured_before(path, [side.name for side in sides], flags.itl_slo)
    found = {one.key: one for one in before if one.key in wanted}
    left = [one for one in rounds if one.key not in found]
    if found:
        run.tell(f"{len(found)} of {len(rounds)} rounds are in {path} already")
    if left:
        with _running(run, sides) as running:
            for one in _measure(run, left, running):
                append(path, one)
                found[one.key] = one
    done = [found[one.key] for one in rounds]
    run.picture(plot(done))
    run.show(table(done))
    share = max(figures.others_cpu_share for one in done for figures in one.sides.values())
    run.console.print(f"Servers that were not asked took {share:.1%} of a processor at most.")
    run.write(done)


def _servers(flags: argparse.Namespace) -> list[Server]:
    promise = f" --itl-slo {flags.itl_slo}" if flags.itl_slo else ""
    command = f"{SERVE} --kv-cache-memory {_CACHE}{promise} --speculative"
    return servers({side: f"{command} {side}" for side in flags.sides}, flags.peer)


@contextmanager
def _running(run: Run, servers: Sequence[Server]) -> Iterator[dict[str, Side]]:
    """All sides at once, warm; key the side's name."""
    sides: dict[str, Side] = {}
    with ExitStack() as stack:
        with run.status("starting") as status:
            for name, model, command in servers:
                status.update(f"starting {name}")
                process, url = stack.enter_context(server_process(command))
                sides[name] = Side(Client(url, model), process.pid)
            for name, side in sides.items():
                status.update(f"warming {name} up")
                _warm_up(side.client)
        yield sides


def _warm_up(client: Client) -> None:
    """Have it learn how long its steps are, with drafts and without."""
    years = itertools.count(1800)
    for num_streams in _WARM_UP_STREAMS:
        questions = [f"What happened in the year {next(years)}?" for _ in range(num_streams)]
        client.measure([[Chat([(question, 48)])] for question in questions])


def _measure(run: Run, rounds: Sequence[Round], sides: Mapping[str, Side]) -> Iterator[Measured]:
    for one in run.track(rounds, "rounds"):
        found = {name: _beside(sides, name, one) for name in in_turn([*sides], one.number)}
        measured = Measured(
            workload=one.workload,
            num_streams=len(one.streams),
            number=one.number,
            itl_slo=run.flags.itl_slo,
            sides={name: found[name] for name in sides},
        )
        run.tell(_line(measured))
        yield measured


def _line(measured: Measured) -> str:
    ratios = ", ".join(f"{side} {ratio:.2f}x" for side, [ratio] in speed_ups([measured]).items())
    case = f"{measured.workload}, {measured.num_streams} streams"
    return f"{case}, round {measured.number + 1}: {ratios}"


def _beside(sides: Mapping[str, Side], name: str, one: Round) -> Figures:
    """Measure a side, and what the others take meanwhile."""
    others = [side for other, side in sides.items() if other != name]
    cpu_s, began_s = sum(side.cpu_s() for side in others), time.perf_counter()
    figures = sides[name].client.measure(one.streams)
    took_s = sum(side.cpu_s() for side in others) - cpu_s
    share = took_s / (time.perf_counter() - began_s)
    return msgspec.structs.replace(figures, others_cpu_share=share)


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


if __name__ == "__main__":
    main("speculation")
