"""Sends a workload to a server, open-loop: each request is sent when it is due."""

import asyncio
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from legato_lab.load.client import Client
from legato_lab.simulation.record import (
    OnProgress,
    RefusedError,
    RequestError,
    RequestRecord,
    Status,
    StopWhen,
)
from legato_lab.simulation.workload import RandomPrompts, Workload, WorkloadRequest

_WATCH_S = 0.5


async def send_workload(
    client: Client,
    workload: Iterable[WorkloadRequest],
    prompts: RandomPrompts,
    *,
    max_concurrency: int | None = None,
    on_progress: OnProgress | None = None,
    until_s: float = math.inf,
    stop_when: StopWhen | None = None,
) -> list[RequestRecord]:
    """Send each request when it is due, and wait until all have ended.

    Prompts share what the workload says, and nothing with prompts sent earlier.

    Args:
        workload: in the order of arrival; each request is drawn after the one before was sent.
        max_concurrency: most requests in flight. A request that must wait arrives when its turn
            comes, so that its latencies are the server's alone.
        until_s: ends the run at this time: requests in flight are cancelled, and no more are sent.
        stop_when: likewise ends the run, once it returns true.

    Returns:
        records of the requests that were sent, by arrival.
    """
    prompts.share_anew()
    run = _Run(client, prompts, max_concurrency)
    sending = asyncio.create_task(run.send(workload))
    try:
        while not sending.done() and run.now_s() < until_s:
            await asyncio.wait([sending], timeout=min(_WATCH_S, until_s - run.now_s()))
            if on_progress is not None:
                on_progress(run.count())
            if stop_when is not None and stop_when(run.now_s(), run.records()):
                break
    finally:
        sending.cancel()
        await asyncio.wait([sending])
    if not sending.cancelled():
        sending.result()
    return run.records()


async def warm_up(client: Client, workload: Workload, prompts: RandomPrompts) -> None:
    """Send the shortest and the longest prompt, so that first-time costs are not measured."""
    lengths = [request.num_prompt_tokens for request in workload]
    requests = [WorkloadRequest(0.0, length, 2) for length in (min(lengths), max(lengths))]
    await send_workload(client, requests, prompts, max_concurrency=1)


@dataclass(slots=True)
class _Attempt:
    """A request in flight.

    Attributes:
        token_times_s: on the clock of `time.perf_counter`.
        status: "cancelled" until it ends otherwise.
    """

    request: WorkloadRequest
    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    status: Status = "cancelled"
    num_tokens: int = 0
    retry_after_s: float | None = None
    error: str | None = None
    num_cached_tokens: int | None = None

    def record(self, start_s: float) -> RequestRecord:
        return RequestRecord(
            request=self.request,
            sent_s=self.sent_s,
            status=self.status,
            token_times_s=[round(at_s - start_s, 6) for at_s in self.token_times_s],
            num_tokens=self.num_tokens or len(self.token_times_s),
            retry_after_s=self.retry_after_s,
            error=self.error,
            num_cached_tokens=self.num_cached_tokens,
        )


class _Run:
    """All attempts of one run."""

    def __init__(self, client: Client, prompts: RandomPrompts, max_concurrency: int | None) -> None:
        self._client = client
        self._prompts = prompts
        self._slots = asyncio.Semaphore(max_concurrency or sys.maxsize)
        self._held_until_s = 0.0
        self._attempts: list[_Attempt] = []
        self._ended: dict[int, RequestRecord] = {}  # key: place among the attempts
        self._start_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    def count(self) -> Counter[Status]:
        return Counter(attempt.status for attempt in self._attempts)

    def records(self) -> list[RequestRecord]:
        """Return all records. Those of ended attempts are cached, so that calls stay cheap."""
        for place, attempt in enumerate(self._attempts):
            if attempt.status != "cancelled" and place not in self._ended:
                self._ended[place] = attempt.record(self._start_s)
        return [
            self._ended.get(place) or attempt.record(self._start_s)
            for place, attempt in enumerate(self._attempts)
        ]

    async def send(self, workload: Iterable[WorkloadRequest]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for request in workload:
                await asyncio.sleep(max(0.0, request.arrival_s - self.now_s()))
                await self._take_slot()
                tasks.create_task(self._attempt(self._arrived(request)))

    async def _take_slot(self) -> None:
        is_held_back = self._slots.locked()
        await self._slots.acquire()
        if is_held_back:
            self._held_until_s = self.now_s()

    def _arrived(self, request: WorkloadRequest) -> _Attempt:
        arrival_s = max(request.arrival_s, self._held_until_s)
        arrived = msgspec.structs.replace(request, arrival_s=round(arrival_s, 6))
        attempt = _Attempt(arrived, sent_s=round(self.now_s(), 6))
        self._attempts.append(attempt)
        return attempt

    async def _attempt(self, attempt: _Attempt) -> None:
        request = attempt.request
        try:
            attempt.num_tokens, attempt.num_cached_tokens = await self._client.complete(
                self._prompts.draw_for(request),
                request.num_output_tokens,
                attempt.token_times_s,
                _extensions(request),
            )
            attempt.status = "ok"
        except RefusedError as error:
            attempt.status, attempt.error = "refused", str(error)
            attempt.retry_after_s = error.retry_after_s
        except RequestError as error:
            attempt.status, attempt.error = "error", str(error)
        finally:
            self._slots.release()


def _extensions(request: WorkloadRequest) -> dict[str, object]:
    """Return Legato's own fields that are set: other servers may not know them."""
    fields = {
        "slo_class": request.slo_class,
        "tenant": request.tenant,
        "priority": request.priority,
    }
    return {name: value for name, value in fields.items() if value}
