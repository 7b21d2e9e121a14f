"""`legato fleet` as it runs: Ray's processes, real HTTP, and engines that only last."""

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fleet.in_process import write_profile
from tests.server.launch import ServerProcess, wait_until

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]

_ENGINE = "legato_lab.simulation.engine_process"
_AGENT = "http://127.0.0.1:52365"
"""Of Ray, on each node."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("fleet")
    flags = ["--replicas", "2", "--replica-cpus", "0.1", "--routing", "round-robin"]
    flags += ["--simulate", write_profile(folder), "--itl-slo", "500ms"]
    server = ServerProcess(flags, folder / "fleet.log", command="fleet")
    try:
        yield server
        # Ray's processes end with it.
        below = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0, server.log.read_text()
        wait_until(lambda: not any(map(_runs, below)), "some of Ray's processes are left")
    finally:
        server.stop()


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def engines(fleet: ServerProcess) -> list[psutil.Process]:
    below = psutil.Process(fleet.process.pid).children(recursive=True)
    return [process for process in below if _runs(process) and _ENGINE in process.cmdline()]


def completed(fleet: ServerProcess, prompt: str, max_tokens: int) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=60)


def test_replicas_are_one_server(fleet: ServerProcess) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda i: completed(fleet, f"Tell {i}", 5), range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    assert fleet.http.get("/health").json()["status"] == "ok"
    assert fleet.metric("num_requests_running") == 0
    assert len(engines(fleet)) == 2


def test_nothing_listens_beyond_this_machine(fleet: ServerProcess) -> None:
    """Ray's processes do not, either; and other users of the machine need Ray's token."""
    own = psutil.Process(fleet.process.pid)
    opened = [found for one in (own, *own.children(recursive=True)) for found in sockets(one)]
    addresses = {found.laddr.ip for found in opened if found.status == psutil.CONN_LISTEN}
    assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}
    job = httpx.post(f"{_AGENT}/api/job_agent/jobs/", json={"entrypoint": "true"}, timeout=60)
    assert job.status_code == 401


def sockets(process: psutil.Process) -> list[Any]:
    try:
        return process.net_connections("inet")
    except psutil.NoSuchProcess:
        return []


def test_a_replica_that_is_killed_under_load_loses_nothing_silently(fleet: ServerProcess) -> None:
    """What has begun there says so, all else is answered, and Ray starts another."""
    victim = engines(fleet)[0].parent()
    assert victim is not None
    with ThreadPoolExecutor(12) as threads:
        asked = [threads.submit(completed, fleet, f"Tell {i}", 400) for i in range(12)]
        wait_until(lambda: fleet.metric("num_requests_running") == 12, "they never all ran")
        victim.kill()
        answers = [one.result() for one in asked]
    codes = [answer.status_code for answer in answers]
    assert codes.count(200) + codes.count(503) == 12
    assert codes.count(200) >= 6, "another replica's have ended, too"
    assert all(
        answer.json()["error"]["code"] == "engine_dead"
        for answer in answers
        if answer.status_code == 503
    )
    assert completed(fleet, "Go on", 5).status_code == 200
    wait_until(lambda: len(engines(fleet)) == 2, "Ray started no other replica")


def test_replicas_come_under_strain_and_go_after_it(tmp_path: Path) -> None:
    flags = ["--replicas", "1", "--max-replicas", "2", "--replica-cpus", "0.1"]
    flags += ["--upscale-delay", "1s", "--downscale-delay", "1s", "--max-num-seqs", "4"]
    flags += ["--simulate", write_profile(tmp_path), "--ttft-slo", "200ms"]
    server = ServerProcess(flags, tmp_path / "fleet.log", command="fleet")
    try:
        with ThreadPoolExecutor(80) as threads:
            is_over = threading.Event()

            def keep_asking(i: int) -> list[int]:
                codes = []
                while not is_over.is_set():
                    codes.append(completed(server, f"Tell {i}", 100).status_code)
                return codes

            asked = [threads.submit(keep_asking, i) for i in range(40)]
            try:
                wait_until(lambda: len(engines(server)) == 2, "no other replica was started")
                wait_until(lambda: len(server_replicas(server)) == 2, "it gets nothing to do")
            finally:
                is_over.set()
            codes = {code for one in asked for code in one.result()}
        assert codes == {200}
        wait_until(lambda: len(server_replicas(server)) == 1, "none of the replicas has gone")
        assert completed(server, "Go on", 5).status_code == 200
    finally:
        server.stop()


def server_replicas(server: ServerProcess) -> set[str]:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {
        sample.labels["replica"]
        for family in families
        for sample in family.samples
        if sample.name == "legato:replica_requests_running"
    }
