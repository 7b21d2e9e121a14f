"""Sets the system clock of a server forward and back under traffic: nothing may depend on it.

A library that is loaded before the C library adds an offset, which it reads from a file that all
processes of the server map, to each reading of the system clock. The machine's own clock is left
alone.
"""

import os
import random
import shutil
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from tests.api.launch import ServerProcess
from tests.fuzz.stopped import ask

_OFFSET = struct.Struct("q")
_FILE_VARIABLE = "LEGATO_TEST_CLOCK"
_SHIFTS_S = {"a second": 1, "an hour": 3600, "a day": 86_400, "30 years": 30 * 365 * 86_400}
_NUM_CLIENTS = 4
_TOLERANCE_S = 120
_SOURCE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile int64_t *offset;

__attribute__((constructor)) static void map(void) {
  static int64_t none;
  const char *path = getenv("%s");
  int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  void *at = fd < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, fd, 0);
  offset = at == MAP_FAILED ? &none : at;
}
int clock_gettime(clockid_t id, struct timespec *at) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int status = real(id, at);
  if (!status && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) && offset)
    at->tv_sec += *offset;
  return status;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
"""


class Clock:
    """The system clock of the processes that are started within `shiftable_clock`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.shift_s = 0

    def shift(self, seconds: int) -> None:
        """Set the offset to the machine's clock."""
        with self._path.open("r+b") as file:  # in place: processes have mapped it
            file.write(_OFFSET.pack(seconds))
        self.shift_s = seconds

    def now_s(self) -> float:
        """Return the time on this clock."""
        return time.time() + self.shift_s


def has_compiler() -> bool:
    return shutil.which("cc") is not None


@contextmanager
def shiftable_clock(folder: Path) -> Iterator[Clock]:
    """Processes that are started in this block get their system clock from the yielded one."""
    source, library, offset = (folder / name for name in ("clock.c", "clock.so", "offset"))
    source.write_text(_SOURCE % _FILE_VARIABLE)
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    offset.write_bytes(_OFFSET.pack(0))
    environment = {"LD_PRELOAD": str(library), _FILE_VARIABLE: str(offset)}
    with patch.dict(os.environ, environment):
        yield Clock(offset)


def shift_clock(clock: Clock, server: ServerProcess, seed: int) -> tuple[str, Counter[str]]:
    """Set the clock while clients ask; return the kind of the shift and what they were told.

    Raises:
        AssertionError: a request failed, a process was taken for dead, or the server does not show
            the time of its clock.
    """
    rng = random.Random(seed)
    name = rng.choice(list(_SHIFTS_S))
    sign = rng.choice([1, -1])
    stored = _store(server, clock)
    with ThreadPoolExecutor(_NUM_CLIENTS) as pool:
        asking = [pool.submit(ask, server, rng.randrange(2**32)) for _ in range(_NUM_CLIENTS)]
        time.sleep(rng.uniform(0.0, 0.5))
        clock.shift(sign * _SHIFTS_S[name])
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0.0, 3.0))
            clock.shift(0)
        told = Counter(one.result() for one in asking)
    assert set(told) <= {"200", "429"}, told
    server.http.get(f"/v1/responses/{stored}").raise_for_status()
    server.http.delete(f"/v1/responses/{_store(server, clock)}").raise_for_status()
    server.http.get("/health").raise_for_status()  # a busy machine may keep a promise from it
    for metric in ("num_engine_restarts_total", "num_stuck_processes_total"):
        assert server.metric(metric) == 0, metric
    return f"{'forward' if sign > 0 else 'back'} by {name}", told


def _store(server: ServerProcess, clock: Clock) -> str:
    """Store a response, which has the time of the server's clock; return its id."""
    body = {"input": "Hi", "max_output_tokens": 16}
    response = server.http.post("/v1/responses", json=body).raise_for_status().json()
    assert abs(response["created_at"] - clock.now_s()) < _TOLERANCE_S, "another clock is shown"
    return str(response["id"])
