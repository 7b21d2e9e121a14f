"""Sarathi-Serve's experiment, simulated: capacity with whole prompts, fixed budgets and a promise.

    python -m benchmarks.sarathi [--sharegpt FILE] [--arxiv FILE] [--seeds K] [--out out]

Mistral-7B on an A100 (the profile from published figures), P99 ITL within 100 ms and 500 ms, with
prompts and outputs as long as those of ShareGPT's conversations and of arXiv's summarizations: of
the quantiles in the paper (arXiv:2403.02310, table 2), or of files that `--workload` reads. The
budgets of 512 and 2,048 tokens are the paper's for the one SLO and the other. Prints a table and
writes sarathi.json.
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from legato.core.config import SchedulerConfig
from legato.lab.capacity.search import Capacity, SearchSettings, TrialLength
from legato.lab.load.simulated_sessions import simulate_search
from legato.lab.workload.choice import WorkloadChoice
from legato.simulation.policies import parse_policy
from legato.simulation.profiled_server import SimulatedServer
from legato.simulation.profiles import load_profile

PROFILE = "mistral-7b-a100"
SHAREGPT = "prompt p50=1730 p90=5696, output p50=415 p90=834"
ARXIV = "prompt p50=7059 p90=12985, output p50=208 p90=371"
_MAX_MODEL_LENS = {"ShareGPT": 8192, "arXiv": 16_384}
_LEAST_RATE_PER_S = 0.05
_START_RATES_PER_S = {"ShareGPT": 4.0, "arXiv": 2.0}
ITL_SLOS_S = (0.1, 0.5)
POLICIES = ("whole-first", "fixed:512", "fixed:2048", "slo")
_MAX_NUM_SEQS = 128


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: source: as `--workload` takes it; settings: of the search."""

    dataset: str
    source: str
    policy: str
    settings: SearchSettings


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in a case."""

    case: Case
    capacity: Capacity


def main() -> None:
    arguments = _parse()
    console = Console(highlight=False)
    results: list[Result] = []
    with ProcessPoolExecutor() as pool:
        for result in pool.map(search, _cases(arguments)):
            results.append(result)
            case = result.case
            told = _told(result.capacity)
            console.print(f"{case.dataset}, {case.settings.itl_slo_s} s, {case.policy}: {told}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "sarathi.json").write_bytes(msgspec.json.encode(results))
    console.print(_table(results))
    console.print(f"written to {arguments.out}/sarathi.json")


def search(case: Case) -> Result:
    """Find the capacity of the simulated server that a case is about."""
    config = SchedulerConfig(itl_slo_s=case.settings.itl_slo_s, max_num_seqs=_MAX_NUM_SEQS)
    max_model_len = _MAX_MODEL_LENS[case.dataset]
    profile = msgspec.structs.replace(load_profile(PROFILE), max_model_len=max_model_len)
    server = SimulatedServer(profile=profile, scheduler=parse_policy(case.policy, config))
    choice = WorkloadChoice(source=case.source, max_model_len=max_model_len, too_long="drop")
    return Result(case=case, capacity=simulate_search(server, choice.for_trials(), case.settings))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sharegpt", default=SHAREGPT, metavar="FILE|QUANTILES")
    parser.add_argument("--arxiv", default=ARXIV, metavar="FILE|QUANTILES")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


def _cases(arguments: argparse.Namespace) -> list[Case]:
    return [
        Case(
            dataset=dataset,
            source=source,
            policy=policy,
            settings=SearchSettings(
                itl_slo_s=itl_slo_s,
                length=TrialLength(least_requests=1000),
                num_seeds=arguments.seeds,
                start_rate_per_s=_START_RATES_PER_S[dataset],
                least_rate_per_s=_LEAST_RATE_PER_S,
                precision=0.02,
            ),
        )
        for dataset, source in (("ShareGPT", arguments.sharegpt), ("arXiv", arguments.arxiv))
        for itl_slo_s in ITL_SLOS_S
        for policy in POLICIES
    ]


def _told(capacity: Capacity) -> str:
    interval = capacity.interval_per_s
    within = "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"
    return f"{capacity.rate_per_s:.2f}/s{within}" if capacity.best else "none"


def _table(results: Sequence[Result]) -> Table:
    """A row a policy, with its capacity over that of whole prompts."""
    columns: dict[str, dict[str, Capacity]] = {}
    for result in results:
        name = f"{result.case.dataset}, {1000 * result.case.settings.itl_slo_s:g} ms"
        columns.setdefault(name, {})[result.case.policy] = result.capacity
    table = Table("", *columns)
    for policy in POLICIES:
        table.add_row(policy, *(_cell(column, policy) for column in columns.values()))
    return table


def _cell(column: dict[str, Capacity], policy: str) -> str:
    capacity, base = column[policy], column[POLICIES[0]]
    ratio = f", {capacity.rate_per_s / base.rate_per_s:.2f}x" if base.best else ""
    worst = min((trial.attainment for trial in capacity.best), default=None)
    attained = "" if worst is None else f", {worst:.0%} attained"
    return f"{_told(capacity)}{ratio}{attained}"


if __name__ == "__main__":
    main()
