"""Stops and kills processes of a server under traffic: every request ends, and it recovers."""

import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec
import psutil

from tests.api.launch import ServerProcess, long_request, running_server
from tests.fuzz.delays import Delays
from tests.fuzz.watch import BROKEN, HEALTH, STREAM, Wait, read_waits, watching
from tests.fuzz.watched import ITL_S, MAX_DELAY_S

_FLAGS = ("--max-num-seqs", "16", "--itl-slo", f"{ITL_S}s", "--log-level", "warning")
_LONG_LIFE_S = 70.0
"""An engine that lives shorter, three times in a row, ends the server."""
_PATIENCE_S = 60.0
_NUM_CLIENTS = 6
_MOST_TOKENS = 64
_ENDS = (200, 429, 500, 503)
"""How a request may end whose process was taken away."""
_ACTS = ("stop", "stop for a while", "kill")
_LONGEST_STOP_S, _LONGEST_PAUSE_S = 8.0, 15.0
"""Of parts of a server; of all of it, longer than a process may be silent."""
_WHOLES = ("server", "all")
"""Parts that include the HTTP server, which nothing starts again: they stop for a while only."""
_MESSAGES = [{"role": "user", "content": "Hi"}]


class Case(msgspec.Struct):
    """One try.

    Attributes:
        kind: the process, and what was done to it.
        start_s, end_s: on the clock of `time.monotonic`; it ends when the server has recovered.
        told: what its clients were told.
    """

    seed: int
    kind: str
    start_s: float
    end_s: float = 0.0
    told: Counter[str] = msgspec.field(default_factory=Counter)
    failure: str = ""

    @property
    def is_engines(self) -> bool:
        """Whether streams may end or wait."""
        return self.kind.startswith(("engine", *_WHOLES))

    @property
    def is_of_all(self) -> bool:
        """Whether nothing can be answered meanwhile."""
        return self.kind.startswith(_WHOLES)


class Stopped(msgspec.Struct):
    """What came of all cases.

    Attributes:
        health_s, stream_s: the longest delays of others: while the HTTP server was left alone, and
            of the stream, while the engine was, too.
        failures: what must not have been.
    """

    told: Counter[str]
    longest_s: float
    health_s: float
    stream_s: float
    failures: list[str]


def stop_processes(seeds: Iterable[int], seconds: float, folder: Path) -> Stopped:
    """Take processes of a server of its own away, case after case, for so long."""
    waits_file = folder / "waits"
    with running_server(folder, *_FLAGS, is_forked=False) as server:
        with watching(server, waits_file):
            cases = list(_cases(server, seeds, seconds))
        log = server.log.read_text()
    found = _judged(cases, read_waits(waits_file))
    found.failures += [log[log.index("Traceback") :]] if "Traceback" in log else []
    return found


def _cases(server: ServerProcess, seeds: Iterable[int], seconds: float) -> Iterator[Case]:
    end_s = time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() > end_s:
            return
        rng = random.Random(seed)
        part, processes = _victims(server, rng)
        act = _ACTS[1] if part in _WHOLES else rng.choice(_ACTS)
        case = Case(seed, f"{part}, {act}", time.monotonic())
        try:
            num_stuck, num_deaths = _num_replaced(server)
            case.told = _attacked(server, rng, processes, act, case.is_of_all)
            wait_for_health(server)
            if case.is_of_all:
                assert _num_replaced(server) == (num_stuck, num_deaths), "a process was replaced"
                assert set(case.told) <= {"200", "429"}, case.told
        except Exception as error:
            case.failure = f"{type(error).__name__}: {error}"
        case.end_s = time.monotonic()
        yield case


def _victims(server: ServerProcess, rng: random.Random) -> tuple[str, list[psutil.Process]]:
    """A part of the server that may be taken away, and its processes."""
    zygote = server.zygote
    readers = zygote.children()
    engine = server.engine
    found = {
        "readers": readers,
        "a reader": rng.sample(readers, min(1, len(readers))),
        "zygote": [zygote],
        "zygote and readers": [zygote, *readers],
        "server": [psutil.Process(server.process.pid)],
        "all": [psutil.Process(server.process.pid), engine, zygote, *readers],
    }
    if time.time() - engine.create_time() > _LONG_LIFE_S:
        found["engine"] = [engine]
    part = rng.choice(list(found))
    return part, found[part]


def _attacked(
    server: ServerProcess,
    rng: random.Random,
    processes: list[psutil.Process],
    act: str,
    is_pause: bool,
) -> Counter[str]:
    """What clients are told beside it; raises where a request does not end as it may."""
    with ThreadPoolExecutor(_NUM_CLIENTS) as pool:
        asking = [pool.submit(ask, server, rng.randrange(2**32)) for _ in range(_NUM_CLIENTS)]
        time.sleep(rng.uniform(0.0, 0.5))
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # it ended by itself
                process.kill() if act == "kill" else process.suspend()
        if act == "stop for a while":
            time.sleep(rng.uniform(0.1, _LONGEST_PAUSE_S if is_pause else _LONGEST_STOP_S))
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.resume()
        return Counter(one.result() for one in asking)


def ask(server: ServerProcess, seed: int) -> str:
    """Send requests of one kind or another, a few after each other; returns the last status."""
    rng = random.Random(seed)
    status = ""
    with httpx.Client(base_url=server.url, timeout=_PATIENCE_S) as http:
        for _ in range(rng.randint(1, 4)):
            max_tokens = rng.randint(1, _MOST_TOKENS)
            path, body = rng.choice(
                [
                    ("/tokenize", {"prompt": "x" * 10 ** rng.randint(1, 5)}),
                    ("/v1/completions", long_request(max_tokens=max_tokens)),
                    ("/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": max_tokens}),
                ]
            )
            response = http.post(path, json=body)
            status = str(response.status_code)
            if response.status_code not in _ENDS:
                raise AssertionError(f"{path}: {status}: {response.text}")
            if response.status_code == _ENDS[0] and body.get("stream"):
                status = _end_of_stream(response.text)
    return status


def _end_of_stream(text: str) -> str:
    *_, last = [line for line in text.splitlines() if line]
    if last == "data: [DONE]":
        return "200"
    error = json.loads(last.removeprefix("data: "))["error"]
    return f"200, then {error['code']}"


def _num_replaced(server: ServerProcess) -> tuple[float, float]:
    """How many processes were killed because they did not answer, and engines that died."""
    names = "num_stuck_processes_total", "num_engine_restarts_total"
    return server.metric(names[0]), server.metric(names[1])


def wait_for_health(server: ServerProcess) -> None:
    """Wait until /health says that all is well."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        health = server.http.get("/health")
        if health.status_code == _ENDS[0] and health.json()["status"] == "ok":
            return
        time.sleep(0.05)
    raise AssertionError(f"/health still says {health.text}")


def _judged(cases: list[Case], waits: list[Wait]) -> Stopped:
    delays = Delays(waits, ITL_S)
    starts_s = [case.start_s for case in cases]
    health_s = [
        0.0 if case.is_of_all else delay_s
        for case, delay_s in zip(cases, delays.worst_s(HEALTH, starts_s), strict=True)
    ]
    stream_s = [
        0.0 if case.is_engines else delay_s
        for case, delay_s in zip(cases, delays.worst_s(STREAM, starts_s), strict=True)
    ]
    failures = [f"seed {case.seed}, {case.kind}: {case.failure}" for case in cases if case.failure]
    failures += [
        f"seed {case.seed}, {case.kind}: {what} was delayed by {1000 * delay_s:.0f} ms"
        for what, all_s in (("/health", health_s), ("the stream", stream_s))
        for case, delay_s in zip(cases, all_s, strict=True)
        if delay_s > MAX_DELAY_S
    ]
    failures += [
        wait.detail
        for wait in waits
        if wait.what == BROKEN and not any(_explains(case, wait) for case in cases)
    ]
    told: Counter[str] = Counter()
    for case in cases:
        told += Counter({f"{case.kind} {answer}": count for answer, count in case.told.items()})
    longest_s = max((case.end_s - case.start_s for case in cases), default=0.0)
    return Stopped(told, longest_s, max(health_s, default=0), max(stream_s, default=0), failures)


def _explains(case: Case, wait: Wait) -> bool:
    """Whether a stream or /health had to fail then."""
    return case.is_engines and case.start_s <= wait.end_s and wait.start_s <= case.end_s
