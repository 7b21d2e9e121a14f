"""Does a server stand overload, clients that leave, malformed requests and a killed engine?

    python -m benchmarks soak [--minutes 20] [--seed 0] [--max-growth 0.02]

Takes the outputs of some prompts one at a time, then sends the same prompts at three times the rate
that the server sustains: 20 % of the clients go away in the middle, 5 % send something malformed,
and half-way the engine process is killed. Draws resident memory over time, prints what must hold,
and exits with status 1 where something does not.

In float32, so that an output hardly depends on what else is in the batch; where the best two tokens
are as good as even (`cases.py`), either is taken, and counted.
"""

import argparse
import asyncio

import httpx
import psutil

from benchmarks.runner.flags import add_seed
from benchmarks.runner.main import main
from benchmarks.runner.run import Run
from benchmarks.runner.servers import SERVE, server_process
from benchmarks.soak.cases import undisturbed_cases
from benchmarks.soak.report import checks, checks_table, ends_table, figures, plot_memory
from benchmarks.soak.run import Soak

MINUTES = 21

# A cache so small that it is full, and requests are preempted, all the time.
_SERVER = f"{SERVE} --dtype float32 --max-model-len 512 --kv-cache-memory 128M"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--cases", type=int, default=32, help="different prompts")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="requests that run at once")
    parser.add_argument("--max-waiting", type=int, default=24, help="requests that may wait")
    parser.add_argument("--num-threads", type=int, help="of the server's forward pass")
    add_seed(parser)
    parser.add_argument("--max-growth", type=float, default=0.02, help="of resident memory")


def measure(run: Run) -> int:
    flags = run.flags
    with (
        run.path(".log").open("w") as log,
        run.status("starting the server") as status,
        server_process(_command(flags), log) as (process, base_url),
    ):
        status.update("taking undisturbed outputs")
        with httpx.Client(base_url=base_url, timeout=60.0) as http:
            cases = undisturbed_cases(http, flags.cases, flags.seed)
        soak = Soak(
            psutil.Process(process.pid),
            base_url,
            cases,
            minutes=flags.minutes,
            max_waiting=flags.max_waiting,
            seed=flags.seed,
        )
        asyncio.run(soak.run(lambda soak: status.update(_progress(soak))))
    found = checks(soak, flags.max_growth)
    run.console.print(f"{soak.minutes:g} minutes at {soak.rate_per_s:.1f} requests a second")
    run.show(ends_table(soak))
    run.show(checks_table(found))
    run.picture(plot_memory(soak))
    run.write(figures(soak, found))
    return 0 if all(check.holds for check in found) else 1


def _command(flags: argparse.Namespace) -> str:
    limits = f"--max-num-seqs {flags.max_num_seqs} --max-waiting {flags.max_waiting}"
    threads = "" if flags.num_threads is None else f"--num-threads {flags.num_threads}"
    return f"{_SERVER} {limits} {threads}"


def _progress(soak: Soak) -> str:
    ends = ", ".join(f"{num} {end}" for end, num in sorted(soak.ends.items()))
    return f"{soak.now_s / 60.0:.1f} of {soak.minutes:g} minutes: {ends}"


if __name__ == "__main__":
    main("soak")
