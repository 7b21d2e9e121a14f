"""What becomes of every request when a replica is killed under load?

    python -m benchmarks routing.kill [--at 40] [--seconds 80] [--rate 10]

Sends conversations to a fleet, and kills a replica with SIGKILL in the middle. Each request is
counted once: it was answered with all its tokens, refused, or ended with an error that says that
its replica died, as often as the front door says so. The exit status is 1 where a request was lost
silently.
"""

import argparse
import asyncio
import re
from collections import Counter

import psutil

from benchmarks.routing.fleets import add_fleet_flags, fleet_of, running, send
from benchmarks.routing.traffic import conversations
from benchmarks.runner.flags import add_seconds, add_seed
from benchmarks.runner.main import main
from benchmarks.runner.run import Run
from legato.cli.table import Table
from legato_fleet.routing.router import ROUTING_POLICIES
from legato_lab.report.console import progress_bar
from legato_lab.simulation import engine_process
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.workload import Workload

MINUTES = 2

_DIED = "engine_dead"
"""Code of the error that says so."""
LEFT = re.compile(r"(\d+) are run elsewhere, and (\d+) end")
"""What the front door logs of a replica that is gone."""

WHOLE, REFUSED, TOLD_BEFORE, TOLD_AFTER, LOST = (
    "answered with all tokens",
    "refused (429)",
    "told that the replica died, before a token",
    "told that the replica died, after some",
    "lost silently",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_seconds(parser, 80.0)
    parser.add_argument("--at", type=float, default=40.0, help="when the replica is killed")
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second")
    parser.add_argument("--routing", choices=list(ROUTING_POLICIES), default="kept-promise")
    add_seed(parser)
    add_fleet_flags(parser)


def measure(run: Run) -> int:
    flags = run.flags
    workload = conversations(flags.seconds, flags.rate, flags.seed)
    log_path = run.path(".log")
    with (
        log_path.open("w") as log,
        running(fleet_of(flags), flags.routing, log) as (process, url),
    ):
        records = asyncio.run(_served(url, workload, process, flags.at))
    counts = Counter(map(outcome, records))
    in_flight = [record for record in records if _is_at(record, flags.at)]
    told = LEFT.findall(log_path.read_text())
    num_rerun, num_ended = (sum(int(numbers[place]) for numbers in told) for place in (0, 1))
    run.show(_table(counts, Counter(map(outcome, in_flight)), num_rerun))
    adds_up = (
        counts.total() == len(workload)
        and counts[LOST] == 0
        and counts[TOLD_BEFORE] + counts[TOLD_AFTER] == num_ended
    )
    print("every request is accounted for" if adds_up else "the counts do not add up")
    run.write({"counts": counts, "sent": len(records), "run_elsewhere": num_rerun})
    return 0 if adds_up else 1


def outcome(record: RequestRecord) -> str:
    """Which of the outcomes it came to."""
    if record.status == "ok" and record.num_tokens == record.request.num_output_tokens:
        return WHOLE
    if record.status == "refused":
        return REFUSED
    if record.status == "error" and _DIED in (record.error or ""):
        return TOLD_AFTER if record.token_times_s else TOLD_BEFORE
    return LOST


async def _served(
    url: str, workload: Workload, process: psutil.Process, at_s: float
) -> list[RequestRecord]:
    async def kill() -> None:
        await asyncio.sleep(at_s)
        replica(process).kill()

    with progress_bar("a replica is killed", len(workload)) as on_progress:
        killing = asyncio.create_task(kill())
        records = await send(url, workload, on_progress)
        await killing
    return records


def replica(front_door: psutil.Process) -> psutil.Process:
    """One below a front door: Ray's process, or the engine's where there is no Ray."""
    below = front_door.children(recursive=True)
    engine = next(one for one in below if engine_process.__name__ in one.cmdline())
    parent = engine.parent()
    assert parent is not None
    return engine if parent == front_door else parent


def _is_at(record: RequestRecord, at_s: float) -> bool:
    """Whether it had been sent by then, and had not ended as far as can be told."""
    is_later = record.last_event_s > at_s or record.status == "error"
    return record.sent_s <= at_s and is_later


def _table(counts: Counter[str], in_flight: Counter[str], num_rerun: int) -> Table:
    rows = [
        [name, str(counts[name]), str(in_flight[name])]
        for name in (WHOLE, REFUSED, TOLD_BEFORE, TOLD_AFTER, LOST)
    ]
    rows.append(["sent", str(counts.total()), str(in_flight.total())])
    rows.append(["of these run elsewhere, from their beginning", str(num_rerun), ""])
    return Table("A replica is killed", ["", "requests", "in flight then"], rows)


if __name__ == "__main__":
    main("routing.kill")
