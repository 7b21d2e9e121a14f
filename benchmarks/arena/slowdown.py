"""Slowdown of prompts on a trace: time to first token over what the prompt would take alone."""

import argparse
import math
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.arena.case import Shape
from benchmarks.arena.shapes import alone_s, shapes
from legato.core.config import SchedulerConfig
from legato.scheduler.order import ORDERS
from legato_lab.simulation.profiled_server import SimulatedServer
from legato_lab.simulation.profiles import Profile
from legato_lab.simulation.record import RequestRecord
from legato_lab.simulation.simulated_run import SimulatedRun, simulate
from legato_lab.simulation.workload import Workload, cut_to, rescaled, with_poisson_arrivals
from legato_lab.workload.traces import read_workload

_BOUNDS = (0, 256, 1024, 4096, 16_384, 131_072)
"""Bounds of the classes of prompts, in tokens."""
_EDF_TTFT_S = 5.0
"""Without deadlines, `edf` is first come, first served."""


class SlowdownRun(msgspec.Struct, frozen=True, kw_only=True):
    """A trace on a shape at a load.

    Attributes:
        load: share of the rate at which the shape serves the trace when all of it waits.
        is_poisson: whether requests arrive at random, instead of in the trace's bursts.
        settings: fields of `SchedulerConfig`.
    """

    trace: str
    num_requests: int
    shape: Shape
    load: float
    order: str
    settings: dict[str, Any]
    is_poisson: bool = False


class Distribution(msgspec.Struct, frozen=True):
    """Of slowdowns; `worst_s` is the longest time to first token."""

    num: int
    mean: float
    p50: float
    p99: float
    worst_s: float

    @classmethod
    def of(cls, slowdowns: list[float], ttfts_s: list[float]) -> "Distribution":
        if not slowdowns:
            return cls(0, math.nan, math.nan, math.nan, math.nan)
        p50, p99 = np.percentile(slowdowns, (50, 99)).tolist()
        return cls(len(slowdowns), float(np.mean(slowdowns)), p50, p99, max(ttfts_s))


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: by_length: key the class of prompts, as "256 to 1024"."""

    trace: str
    shape: str
    load: float
    order: str
    rate_per_s: float
    all: Distribution
    by_length: dict[str, Distribution]


def add_slowdown_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slowdown", nargs="+", type=Path, metavar="TRACE", help="traces; no cases are run"
    )
    parser.add_argument("--loads", default="0.5,0.8,0.95", help="shares of capacity (%(default)s)")
    parser.add_argument("--orders", default="", help="names in ORDERS, by commas; all by default")
    parser.add_argument("--shape", default="7b", help="by commas (%(default)s)")
    parser.add_argument("--poisson", action="store_true", help="arrivals at random, not as traced")
    parser.add_argument("--num-requests", type=int, default=600, help="of a trace (%(default)s)")


def slowdown_runs(flags: argparse.Namespace) -> list[SlowdownRun]:
    """Return the runs that the flags ask for."""
    known = shapes()
    settings: dict[str, Any] = {}
    for pair in flags.set:
        name, _, value = pair.partition("=")
        settings[name] = msgspec.json.decode(value)
    orders = flags.orders.split(",") if flags.orders else [*ORDERS]
    return [
        SlowdownRun(
            trace=str(trace.resolve()),
            num_requests=flags.num_requests,
            shape=known[name],
            load=float(load),
            order=order,
            settings=settings,
            is_poisson=flags.poisson,
        )
        for trace in flags.slowdown
        for name in flags.shape.split(",")
        for load in flags.loads.split(",")
        for order in orders
    ]


def measure(run: SlowdownRun) -> Slowdown | None:
    """Serve the trace at the load, and compare each first token with the prompt alone.

    Returns:
        None where this version has no such order.
    """
    if run.order not in ORDERS:
        return None
    workload = _workload(run.trace, run.num_requests, run.shape.max_model_len)
    rate_per_s = run.load * _capacity_per_s(run.trace, run.num_requests, _Hashed(run.shape))
    arriving = partial(with_poisson_arrivals, seed=0) if run.is_poisson else rescaled
    records = _serve(run, arriving(workload, rate_per_s), run.order).records
    most = SchedulerConfig(**_known(run.settings)).resolve(run.shape.max_model_len)
    assert most.max_num_batched_tokens is not None
    budget = most.max_num_batched_tokens
    found = [(r, _slowdown(run.shape, r, budget)) for r in records if r.ttft_s is not None]
    by_length = {
        f"{low} to {high}": [
            (record, slowed)
            for record, slowed in found
            if low < record.request.num_prompt_tokens <= high
        ]
        for low, high in pairwise(_BOUNDS)
    }
    return Slowdown(
        trace=Path(run.trace).stem,
        shape=run.shape.name,
        load=run.load,
        order=run.order,
        rate_per_s=rate_per_s,
        all=_distribution(found),
        by_length={name: _distribution(some) for name, some in by_length.items() if some},
    )


def _distribution(found: list[tuple[RequestRecord, float]]) -> Distribution:
    return Distribution.of([s for _, s in found], [r.ttft_s or 0.0 for r, _ in found])


def _slowdown(shape: Shape, record: RequestRecord, most_tokens: int) -> float:
    num_tokens = record.request.num_prompt_tokens - (record.num_cached_tokens or 0)
    assert record.ttft_s is not None
    return record.ttft_s / alone_s(shape.costs, num_tokens, most_tokens, shape.turnaround_s)


class _Hashed:
    """A shape as a key of a cache, by its name."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def __hash__(self) -> int:
        return hash(self.shape.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashed) and other.shape.name == self.shape.name


@cache
def _workload(trace: str, num_requests: int, max_model_len: int) -> Workload:
    whole = read_workload(Path(trace))
    start = min(len(whole) // 4, max(0, len(whole) - num_requests))  # traces begin slowly
    return cut_to(whole[start : start + num_requests], max_model_len)


@cache
def _capacity_per_s(trace: str, num_requests: int, hashed: _Hashed) -> float:
    """Return the requests a second that the shape serves when all of them wait."""
    shape = hashed.shape
    workload = _workload(trace, num_requests, shape.max_model_len)
    run = SlowdownRun(
        trace=trace, num_requests=num_requests, shape=shape, load=1.0, order="fcfs", settings={}
    )
    served = _serve(run, rescaled(workload, math.inf), "fcfs")
    return len(served.records) / served.duration_s


def _serve(run: SlowdownRun, workload: Workload, order: str) -> SimulatedRun:
    shape = run.shape
    settings = {"max_waiting": 100_000, **run.settings, "prefill_order": order}
    if order == "edf":
        settings.setdefault("ttft_slo_s", _EDF_TTFT_S)
    profile = Profile(
        costs=shape.costs, max_model_len=shape.max_model_len, kv_cache_tokens=shape.kv_cache_tokens
    )
    server = SimulatedServer(
        profile=profile,
        scheduler=SchedulerConfig(**_known(settings)),
        overhead_s=shape.turnaround_s,
        truth_error=shape.truth_error,
        noise=shape.noise,
    )
    return simulate(server, workload)


def _known(settings: dict[str, Any]) -> dict[str, Any]:
    known = SchedulerConfig.__struct_fields__
    return {name: value for name, value in settings.items() if name in known}
