"""Applies one load after another to a server."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from legato_lab.load.client import Address, connect
from legato_lab.load.open_loop import send_workload, warm_up
from legato_lab.report.console import progress_bar
from legato_lab.simulation.record import RequestError, RequestRecord, Status
from legato_lab.simulation.workload import RandomPrompts, WorkloadRequest
from legato_lab.sweep import LoadKind, at_rate, closed_loop
from legato_lab.workload.choice import WorkloadChoice

_MANY_FAILED = 100


def measure_points(
    address: Address,
    choice: WorkloadChoice,
    prompts: RandomPrompts,
    load_kind: LoadKind,
    loads: Sequence[float],
) -> Iterator[tuple[float, list[RequestRecord]]]:
    """Yield the records of each load, once its requests have ended and the server is idle.

    Raises:
        ConfigError: as `connect` and `WorkloadChoice.load`.
        RequestError: in a closed loop, most requests fail.
    """
    asyncio.run(_warm_up(address, choice, prompts))
    for load in loads:
        label = load_kind.describe(load)
        match load_kind:
            case LoadKind.RATE:
                workload = at_rate(choice, load)
                sending = _send(address, workload, prompts, label, num_requests=len(workload))
            case LoadKind.CONCURRENCY:
                requests = closed_loop(choice, int(load))
                sending = _send(address, requests, prompts, label, max_concurrency=int(load))
        yield load, asyncio.run(sending)


async def _warm_up(address: Address, choice: WorkloadChoice, prompts: RandomPrompts) -> None:
    async with connect(address) as client:
        await warm_up(client, choice.load(), prompts)


async def _send(
    address: Address,
    requests: Iterable[WorkloadRequest],
    prompts: RandomPrompts,
    label: str,
    *,
    num_requests: int | None = None,
    max_concurrency: int | None = None,
) -> list[RequestRecord]:
    async with connect(address) as client:
        with progress_bar(label, num_requests) as show:

            def on_progress(counts: Counter[Status]) -> None:
                show(counts)
                if max_concurrency is not None:
                    _check_failures(counts, label)

            return await send_workload(
                client, requests, prompts, max_concurrency=max_concurrency, on_progress=on_progress
            )


def _check_failures(counts: Counter[Status], label: str) -> None:
    """Raise if most requests fail: a closed loop would send new ones without a pause."""
    num_failed = counts["refused"] + counts["error"]
    if num_failed > max(_MANY_FAILED, counts["ok"]):
        raise RequestError(f"{label}: {num_failed} requests failed, and {counts['ok']} finished")
