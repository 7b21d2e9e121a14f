"""What clients see of an engine process that dies."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from signal import SIGSTOP
from typing import Any

import psutil
import pytest

from tests.api.background import BackgroundRequest, BackgroundStream
from tests.api.launch import ServerProcess, running_server, wait_until
from tests.api.watch import steps, watching
from tests.exact import EXACT

GREEDY: dict[str, Any] = {"prompt": "The sky is", "max_tokens": 8, "temperature": 0}


@pytest.fixture
def one_at_a_time(tmp_path: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path, "--max-num-seqs", "1", *EXACT) as server:
        yield server


def kill_engine(server: ServerProcess) -> bool:
    """Kill the engine process if there is one; returns whether the server is gone, too."""
    if server.process.poll() is not None:
        return True
    with suppress(ValueError, psutil.NoSuchProcess):  # there is none
        server.engine.kill()
    return False


def test_an_engine_is_started_again_but_not_for_ever(one_at_a_time: ServerProcess) -> None:
    server = one_at_a_time
    server.http.patch("/settings", json={"max_num_batched_tokens": 48}).raise_for_status()
    undisturbed = server.http.post("/v1/completions", json=GREEDY).json()
    running = BackgroundStream(server)
    waiting = BackgroundRequest(server, **GREEDY)
    server.wait_for_metric("num_requests_waiting", 1)
    kill_engine(server)

    running.join()
    assert running.is_complete, "the client is told that no more comes"
    assert running.chunks[-1]["error"]["code"] == "engine_dead"
    health = server.http.get("/health")
    assert health.status_code == 503
    assert "restarted" in health.json()["error"]["message"]
    assert server.http.get("/readyz").status_code == 503
    assert server.http.get("/livez").status_code == 200
    assert server.http.get("/startupz").status_code == 200
    refused = server.http.post("/v1/completions", json=GREEDY)
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) >= 1

    answer = waiting.join()
    assert answer.status_code == 200
    assert answer.json()["choices"] == undisturbed["choices"]
    assert server.http.get("/health").status_code == 200
    with watching(server) as updates:
        server.http.post("/v1/completions", json=GREEDY)
        assert next(steps(updates))["budget_tokens"] == 48, "it has forgotten its settings"
    server.wait_for_metric("num_requests_running", 0)
    assert server.metric("num_engine_restarts_total") == 1
    assert server.metric("kv_cache_usage_perc") == 0
    assert server.metric("request_success_total", finished_reason="error") == 2

    wait_until(lambda: kill_engine(server), "the server goes on")
    assert server.process.returncode == 1
    assert "died 3 times in a row" in server.log.read_text()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("stopped")) as server:
        yield server


@pytest.mark.parametrize("has_requests", [False, True])
def test_a_stopped_engine_is_started_again(stopped: ServerProcess, has_requests: bool) -> None:
    """By default an engine with requests may be silent for minutes, and one without for ever."""
    server, engine = stopped, stopped.engine
    num_stuck = server.metric("num_stuck_processes_total", process="engine")
    engine.send_signal(SIGSTOP)
    waiting = [BackgroundRequest(server, **GREEDY)] if has_requests else []
    wait_until(lambda: _is_troubled(server), "/health says that all is well")
    wait_until(lambda: not engine.is_running(), "it goes on")
    wait_until(lambda: not _is_troubled(server), "it is not started again")
    for request in waiting:
        assert request.join().status_code == 200
    assert server.http.post("/v1/completions", json=GREEDY).status_code == 200
    assert server.metric("num_stuck_processes_total", process="engine") == num_stuck + 1


def _is_troubled(server: ServerProcess) -> bool:
    health = server.http.get("/health")
    return health.status_code == 503 or health.json()["status"] == "degraded"


def test_an_engine_that_hangs_is_started_again(tmp_path: Path) -> None:
    flags = ("--max-num-seqs", "1", *EXACT, "--timeout-engine", "4s")
    with running_server(tmp_path, *flags) as server:
        undisturbed = server.http.post("/v1/completions", json=GREEDY).json()
        running = BackgroundStream(server)
        waiting = BackgroundRequest(server, **GREEDY)
        server.wait_for_metric("num_requests_waiting", 1)
        engine = server.engine
        engine.send_signal(SIGSTOP)

        running.join()
        assert running.chunks[-1]["error"]["code"] == "engine_dead"
        assert waiting.join().json()["choices"] == undisturbed["choices"]
        assert server.metric("num_engine_restarts_total") == 1
        assert "has not answered for" in server.log.read_text()
        assert not engine.is_running()
