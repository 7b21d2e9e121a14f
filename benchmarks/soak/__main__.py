"""Does a server stand overload, clients that leave, malformed requests and a killed engine?

    python -m benchmarks.soak [--minutes 20] [--seed 0] [--max-growth 0.02] [--out out]

Takes the outputs of some prompts one at a time, then sends the same prompts at three times the rate
that the server sustains: 20 % of the clients go away in the middle, 5 % send something malformed,
and half-way the engine process is killed. Writes soak.json, soak.log and soak.png (resident memory
over time), prints what must hold, and exits with status 1 where something does not.

In float32, so that an output hardly depends on what else is in the batch; where the best two tokens
are as good as even (`cases.py`), either is taken, and counted.
"""

import argparse
import asyncio
import sys
from pathlib import Path

import httpx
import psutil
from rich.console import Console

from benchmarks.servers import SERVE, server_process
from benchmarks.soak.cases import undisturbed_cases
from benchmarks.soak.report import as_json, checks, checks_table, ends_table, plot_memory
from benchmarks.soak.run import Soak

# A cache so small that it is full, and requests are preempted, all the time.
_SERVER = f"{SERVE} --dtype float32 --max-model-len 512 --kv-cache-memory 128M"


def main() -> int:
    arguments = _parse()
    console = Console(highlight=False)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (
        (arguments.out / "soak.log").open("w") as log,
        console.status("starting the server") as status,
        server_process(_command(arguments), log) as (process, base_url),
    ):
        status.update("taking undisturbed outputs")
        with httpx.Client(base_url=base_url, timeout=60.0) as http:
            cases = undisturbed_cases(http, arguments.cases, arguments.seed)
        soak = Soak(
            psutil.Process(process.pid),
            base_url,
            cases,
            minutes=arguments.minutes,
            max_waiting=arguments.max_waiting,
            seed=arguments.seed,
        )
        asyncio.run(soak.run(lambda soak: status.update(_progress(soak))))
    found = checks(soak, arguments.max_growth)
    plot_memory(soak, arguments.out / "soak.png")
    (arguments.out / "soak.json").write_bytes(as_json(soak, found))
    console.print(f"{soak.minutes:g} minutes at {soak.rate_per_s:.1f} requests a second")
    console.print(ends_table(soak), checks_table(found))
    console.print(f"written to {arguments.out}/soak.json, soak.log and soak.png")
    return 0 if all(check.holds for check in found) else 1


def _command(arguments: argparse.Namespace) -> str:
    flags = f"--max-num-seqs {arguments.max_num_seqs} --max-waiting {arguments.max_waiting}"
    threads = "" if arguments.num_threads is None else f"--num-threads {arguments.num_threads}"
    return f"{_SERVER} {flags} {threads}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--cases", type=int, default=32, help="different prompts")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="requests that run at once")
    parser.add_argument("--max-waiting", type=int, default=24, help="requests that may wait")
    parser.add_argument("--num-threads", type=int, help="of the server's forward pass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-growth", type=float, default=0.02, help="of resident memory")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


def _progress(soak: Soak) -> str:
    ends = ", ".join(f"{num} {end}" for end, num in sorted(soak.ends.items()))
    return f"{soak.now_s / 60.0:.1f} of {soak.minutes:g} minutes: {ends}"


if __name__ == "__main__":
    sys.exit(main())
