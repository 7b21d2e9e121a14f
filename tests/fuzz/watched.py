"""Attacks on a server that is watched meanwhile: what came of each case, and whom it delayed."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec

from tests.api.launch import ServerProcess, running_server
from tests.fuzz.clients import attack
from tests.fuzz.delays import Delays
from tests.fuzz.large import overwhelm
from tests.fuzz.memory import held_bytes, watching_peak
from tests.fuzz.watch import BROKEN, HEALTH, STREAM, read_waits, watching

MAX_DELAY_S = 0.05
"""That a case may cause, beyond what the machine itself did meanwhile."""
MAX_GROWTH = 0.1
ITL_S = 0.1
_WATCHED = ("--itl-slo", f"{ITL_S}s", "--log-level", "warning")
_REST_S = 0.05
_NUM_WARM_UP, _WARM_UP_BYTES, _WARM_UP_REST_S = 24, 2**17, 3.0
_SETTLING_S = 30.0

Attempt = Callable[[ServerProcess, int], tuple[str, Counter[str]]]
"""Takes a seed; returns the kind of the case, and what its clients were told."""
OnCase = Callable[["Case"], None]


class Case(msgspec.Struct):
    """One try.

    Attributes:
        start_s: on the clock of `time.monotonic`.
        health_s, stream_s: the longest delays of others.
        failure: what must not have been.
    """

    seed: int
    kind: str
    start_s: float
    took_s: float
    told: Counter[str]
    health_s: float = 0.0
    stream_s: float = 0.0
    failure: str | None = None


class Watched(msgspec.Struct):
    """What an attack did to a server.

    Attributes:
        machine_s: the machine's own longest delay.
        before, after: what its processes hold in memory, in bytes, by `held_bytes`.
        peak_bytes: memory of the processes, shared pages counted by each.
        failures: of no single case.
    """

    cases: list[Case]
    machine_s: float
    before: Counter[str]
    peak_bytes: int
    after: Counter[str]
    failures: list[str]


def attack_watched(
    flags: Sequence[str],
    attempt: Attempt,
    seeds: Iterable[int],
    seconds: float,
    folder: Path,
    on_case: OnCase,
) -> Watched:
    """Attack a server of its own for so long.

    Args:
        seeds: of the cases; it ends early where there are no more.
    """
    waits_file = folder / "waits"
    with (
        running_server(folder, *flags, *_WATCHED, is_forked=False) as server,
        watching(server, waits_file),
    ):
        _warm_up(server)
        before = held_bytes(server)
        with watching_peak(server) as peak:
            cases = list(_cases(server, attempt, seeds, seconds, on_case))
        after = _settled(server, before)
        log = server.log.read_text()
    waits = read_waits(waits_file)
    delays = Delays(waits, ITL_S)
    starts_s = [case.start_s for case in cases]
    for case, health_s, stream_s in zip(
        cases, delays.worst_s(HEALTH, starts_s), delays.worst_s(STREAM, starts_s), strict=True
    ):
        case.health_s, case.stream_s = health_s, stream_s
    failures = [wait.detail for wait in waits if wait.what == BROKEN]
    failures += [
        f"the {part} grew from {before[part] >> 20} to {after[part] >> 20} MiB"
        for part in _grown(before, after)
    ]
    failures += [log[log.index("Traceback") :]] if "Traceback" in log else []
    return Watched(cases, delays.machine_worst_s(), before, peak.num_bytes, after, failures)


def _warm_up(server: ServerProcess) -> None:
    """Let it start what it starts when it is first wanted."""
    for seed in range(_NUM_WARM_UP):
        attack(server, random.Random(seed))
        overwhelm(server, seed, _WARM_UP_BYTES)
    time.sleep(_WARM_UP_REST_S)


def _cases(
    server: ServerProcess,
    attempt: Attempt,
    seeds: Iterable[int],
    seconds: float,
    on_case: OnCase,
) -> Iterator[Case]:
    end_s = time.monotonic() + seconds
    for seed in seeds:
        start_s = time.monotonic()
        if start_s > end_s:
            return
        kind, told, failure = "failed", Counter[str](), None
        try:
            kind, told = attempt(server, seed)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        case = Case(seed, kind, start_s, time.monotonic() - start_s, told, failure=failure)
        on_case(case)
        yield case
        _rest(server)


def _rest(server: ServerProcess) -> None:
    """Let it finish with a case whose clients may have left, so that no other is blamed for it."""
    time.sleep(_REST_S)
    with suppress(httpx.TransportError):
        server.http.get("/health")
    time.sleep(_REST_S)


def _settled(server: ServerProcess, before: Counter[str]) -> Counter[str]:
    """What is held once it is no more than before, or some time later."""
    deadline_s = time.monotonic() + _SETTLING_S
    while _grown(before, after := held_bytes(server)) and time.monotonic() < deadline_s:
        time.sleep(1.0)
    return after


def _grown(before: Counter[str], after: Counter[str]) -> list[str]:
    return [part for part in after if after[part] > (1 + MAX_GROWTH) * before[part]]
