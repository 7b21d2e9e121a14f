"""More comes than can be served, beside other programs that want the processor."""

import asyncio
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.overload.busy import run_beside_loops
from benchmarks.overload.client import Load
from benchmarks.overload.traffic import arrivals

from tests.api.launch import running_server

SLOS = ("--itl-slo", "150ms", "--ttft-slo", "3s", "--shed-load")
_BOUNDED_S = 30.0
"""Which on a slow machine a request may wait that was admitted before the machine became slow."""


def test_nothing_is_lost_and_nobody_waits_without_bound(
    tmp_path: Path, calibration_dir: Path
) -> None:
    traffic = arrivals(
        seconds=9.0, rate_per_s=5.0, burst=12, burst_every_s=4.0, leaving=0.1, num_tenants=1, seed=0
    )
    with running_server(tmp_path, *SLOS, "--calibration-dir", str(calibration_dir)) as server:
        load = Load(urlsplit(server.url).port or 0)
        asyncio.run(run_beside_loops(load, traffic, 2, (3.0, 7.0), lambda _: None))
        server.wait_for_metric("num_requests_running", 0)
        assert server.metric("num_requests_waiting") == 0
        assert "Traceback" not in server.log.read_text()
    # Anything but a finished answer or a 429 with Retry-After is an error here.
    told = Counter(answer.status for answer in load.answers)
    assert told.total() == len(traffic)
    assert not told["error"], [answer.error for answer in load.answers if answer.error]
    assert told["refused"]
    assert told["ok"]
    waits_s = [a.token_times_s[0] - a.sent_s for a in load.answers if a.token_times_s]
    assert max(waits_s) < _BOUNDED_S
