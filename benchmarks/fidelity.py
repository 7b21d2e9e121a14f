"""Does simulation say what a real server does?

    python -m benchmarks fidelity --workload TRACE [--rate R] [--learn N] [--num-requests N] ...

Learns the machine from the first requests of a trace, as `legato tune` does; `--machine` takes one
that was learned before. Then requests that come later in the trace, which the machine was not
fitted to, go through the real server and through the simulation, under the same settings. Prints
throughput and latencies of both. Where there are several real runs (those of earlier calls with the
same output folder count), they tell how far reality is from itself.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.runner.flags import add_rounds
from benchmarks.runner.main import main
from benchmarks.runner.run import Run
from legato.cli.flags import add_engine_flags, engine_config
from legato.cli.table import Table
from legato.core.config import EngineConfig
from legato.engine.build.blueprint import model_context
from legato_lab.report.report_file import RunReport, read_report, write_report
from legato_lab.simulation.machine import Machine, MeasuredServer
from legato_lab.simulation.machine_file import load_machine, write_machine
from legato_lab.simulation.simulated_run import simulate
from legato_lab.simulation.summary import Slos, Summary, summarize
from legato_lab.simulation.workload import RandomPrompts, Workload, cut_to, rescaled
from legato_lab.tune.learn import learn
from legato_lab.tune.real import run_real
from legato_lab.workload.traces import read_workload

MINUTES = 12

_NUM_SEEDS = 8
_VOCAB_SIZE = 32_000

_FIGURES: dict[str, Callable[[Summary], float | None]] = {
    "requests/s": lambda summary: summary.requests_per_s,
    "total tokens/s": lambda summary: summary.total_tokens_per_s,
    "TTFT p50, s": lambda summary: summary.ttft_s.p50 if summary.ttft_s else None,
    "TTFT p99, s": lambda summary: summary.ttft_s.p99 if summary.ttft_s else None,
    "ITL p50, s": lambda summary: summary.itl_s.p50 if summary.itl_s else None,
    "ITL p99, s": lambda summary: summary.itl_s.p99 if summary.itl_s else None,
}
"""Key what is compared."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", type=Path, required=True, help="a trace")
    parser.add_argument("--rate", type=float, default=0.6, help="mean arrivals a second")
    parser.add_argument("--learn", type=int, default=30, help="requests to learn the machine from")
    parser.add_argument("--num-requests", type=int, default=80, help="requests to compare")
    parser.add_argument("--machine", type=Path, help="machine.json of an earlier call")
    parser.set_defaults(out=Path("out/fidelity"))
    add_rounds(parser, 1, "--runs", help="runs of the real server")
    add_engine_flags(parser)


def measure(run: Run) -> None:
    flags = run.flags
    config = engine_config(flags)
    trace = cut_to(read_workload(flags.workload), model_context(config.model))
    machine = _machine(run, config, trace)
    first = flags.learn
    tested = rescaled(trace[first : first + flags.num_requests], flags.rate)
    for _ in range(flags.rounds):
        _serve(run, config, tested)
    reports = [read_report(path) for path in sorted(flags.out.glob("real-*.json"))]
    real = [report.summary for report in reports if isinstance(report, RunReport)]
    simulated = []
    for seed in range(_NUM_SEEDS):
        server = MeasuredServer(machine=machine, scheduler=config.scheduler, seed=seed)
        simulated.append(summarize(simulate(server, tested).records, Slos()))
    run.show(_table(real, simulated))
    run.write({"real": real, "simulated": simulated})


def _machine(run: Run, config: EngineConfig, trace: Workload) -> Machine:
    flags = run.flags
    if flags.machine is not None:
        return load_machine(str(flags.machine))
    learning = rescaled(trace[: flags.learn], flags.rate)
    learned = learn(config, learning, _prompts(), run.tell)
    write_machine(run.file("machine.json"), learned.machine, learned.about)
    return learned.machine


def _serve(run: Run, config: EngineConfig, workload: Workload) -> None:
    """Send the workload to a real server, and keep what came of it."""
    records = run_real(config, workload, _prompts(), "real").records
    place = len(list(run.flags.out.glob("real-*.json")))
    report = RunReport.of("real", {}, Slos(), records)
    write_report(run.file(f"real-{place}.json"), report)


def _prompts() -> RandomPrompts:
    return RandomPrompts(vocab_size=_VOCAB_SIZE, seed=0)


def _table(real: Sequence[Summary], simulated: Sequence[Summary]) -> Table:
    runs = [f"real {place + 1}" for place in range(len(real))]
    header = ["", *runs, "simulated", "simulated / real", "real max / min"]
    rows = []
    for name, of in _FIGURES.items():
        values = np.array([of(summary) for summary in real], dtype=float)
        mean = float(np.mean(np.array([of(summary) for summary in simulated], dtype=float)))
        told = [f"{value:.4g}" for value in values]
        ratios = [f"{mean / values.mean():.3f}", f"{values.max() / values.min():.3f}"]
        rows.append([name, *told, f"{mean:.4g}", *(ratios if len(values) else ["", ""])])
    return Table("Simulation and reality", header, rows)


if __name__ == "__main__":
    main("fidelity")
