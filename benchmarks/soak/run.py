"""One soak, from the undisturbed outputs to the last request."""

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from http import HTTPStatus

import httpx
import msgspec
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.soak.cases import Case
from benchmarks.soak.clients import MALFORMED, End, Outcome, complete, leave, send_malformed
from benchmarks.soak.memory import Resident, engine_of, sample

_OVERLOAD = 3.0
_MOST_EXTENDED = 4.0
KINDS = ("malformed", "leaves", "waits", "streams")
_SHARES = (0.05, 0.20, 0.25, 0.50)
_MEAN_STAY_S = 5.0  # of clients that leave: some wait, some have begun to read
_KILL_AT = 0.5  # of the soak
_SAMPLE_S = 0.5
_IDLE_TIMEOUT_S = 60.0

OnProgress = Callable[["Soak"], None]


class Sent(msgspec.Struct):
    """One request of the soak.

    Attributes:
        kind: one of `KINDS`.
        case: index of its prompt, which a malformed one has not.
        outcome: None until it has ended.
    """

    at_s: float
    kind: str
    case: int
    outcome: Outcome | None = None


class Counts(msgspec.Struct, frozen=True):
    """What the server counts.

    Attributes:
        num_unfinished: requests that run or wait.
        kv_usage: share of the cache's blocks that requests hold.
        num_ended: requests that ended since the start, for any reason.
    """

    num_unfinished: float
    kv_usage: float
    num_restarts: float
    num_ended: float

    @classmethod
    def of(cls, metrics: str) -> "Counts":
        """Args: metrics: in Prometheus' text format."""
        sums: defaultdict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(metrics):
            for one in family.samples:
                sums[one.name.removeprefix("legato:")] += one.value
        return cls(
            num_unfinished=sums["num_requests_running"] + sums["num_requests_waiting"],
            kv_usage=sums["kv_cache_usage_perc"],
            num_restarts=sums["num_engine_restarts_total"],
            num_ended=sums["request_success_total"],
        )


class Soak:
    """Sends the load, kills the engine once, and watches.

    Args:
        minutes: how long new requests come.
        max_waiting: requests that the server lets wait. As many are sent at once, to tell from them
            what rate it sustains.

    Attributes:
        rate_per_s: of arrivals.
        health: statuses of /health, in order, each once in a row.
        killed_s: when the engine was killed.
        counts: the server's own, when all requests had ended.
    """

    def __init__(
        self,
        server: psutil.Process,
        base_url: str,
        cases: list[Case],
        *,
        minutes: float,
        max_waiting: int,
        seed: int,
    ) -> None:
        self.minutes = minutes
        self.max_waiting = max_waiting
        self.cases = cases
        self.rate_per_s = 0.0
        self.sent: list[Sent] = []
        self.memory: list[Resident] = []
        self.health: list[int] = []
        self.killed_s: float | None = None
        self.counts: Counts | None = None
        self._server = server
        self._base_url = base_url
        self._rng = np.random.default_rng(seed)
        self._start_s = 0.0

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self._start_s

    @property
    def ends(self) -> Counter[End]:
        """Of the requests that have ended."""
        return Counter(sent.outcome.end for sent in self.sent if sent.outcome is not None)

    async def run(self, on_progress: OnProgress) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        async with httpx.AsyncClient(base_url=self._base_url, timeout=None, limits=limits) as http:
            self.rate_per_s = _OVERLOAD * await self._sustained_rate(http)
            self._start_s = time.perf_counter()
            watching = asyncio.create_task(self._watch(http, on_progress))
            await self._send_all(http)
            self.counts = await self._counts_when_idle(http)
            watching.cancel()
            await asyncio.wait([watching])

    @property
    def _is_over(self) -> bool:
        """A slow machine is given longer, until requests have ended in every way."""
        has_all_ends = self.ends.keys() >= set(End) - {End.LOST}
        return self.now_s > 60.0 * self.minutes * (1.0 if has_all_ends else _MOST_EXTENDED)

    async def _sustained_rate(self, http: httpx.AsyncClient) -> float:
        """Requests that end in a second when many are there at once."""
        started_s = time.perf_counter()
        burst = itertools.islice(itertools.cycle(self.cases), self.max_waiting)
        outcomes = await asyncio.gather(*(complete(http, case, stream=True) for case in burst))
        assert all(outcome.end is End.FINISHED for outcome in outcomes), outcomes
        return self.max_waiting / (time.perf_counter() - started_s)

    async def _send_all(self, http: httpx.AsyncClient) -> None:
        killing = asyncio.create_task(self._kill_engine())
        async with asyncio.TaskGroup() as tasks:
            while not self._is_over:
                await asyncio.sleep(self._rng.exponential(1.0 / self.rate_per_s))
                tasks.create_task(self._send_one(http))
        await killing

    async def _kill_engine(self) -> None:
        await asyncio.sleep(_KILL_AT * 60.0 * self.minutes)
        engine = engine_of(self._server)
        assert engine is not None
        engine.kill()
        self.killed_s = self.now_s

    async def _send_one(self, http: httpx.AsyncClient) -> None:
        kind = str(self._rng.choice(KINDS, p=_SHARES))
        index = int(self._rng.integers(len(self.cases)))
        sent = Sent(self.now_s, kind, index)
        self.sent.append(sent)
        case = self.cases[index]
        match kind:
            case "malformed":
                body = MALFORMED[int(self._rng.integers(len(MALFORMED)))]
                sent.outcome = await send_malformed(http, body)
            case "leaves":
                stay_s = self._rng.exponential(_MEAN_STAY_S)
                sent.outcome = await leave(http, case, stay_s)
            case "streams" | "waits":
                sent.outcome = await complete(http, case, stream=kind == "streams")

    async def _watch(self, http: httpx.AsyncClient, on_progress: OnProgress) -> None:
        while True:
            status = (await http.get("/health")).status_code
            if status == HTTPStatus.OK:  # what a new engine takes while it loads is no growth
                self.memory += sample(self._server, self.now_s)
            if self.health[-1:] != [status]:
                self.health.append(status)
            on_progress(self)
            await asyncio.sleep(_SAMPLE_S)

    async def _counts_when_idle(self, http: httpx.AsyncClient) -> Counts:
        """What the server counts once it says that nothing runs or waits, or is asked no longer."""
        deadline_s = self.now_s + _IDLE_TIMEOUT_S
        while True:
            counts = Counts.of((await http.get("/metrics")).text)
            if not counts.num_unfinished or self.now_s > deadline_s:
                return counts
            await asyncio.sleep(_SAMPLE_S)
