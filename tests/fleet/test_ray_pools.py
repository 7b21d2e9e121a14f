"""A fleet of two pools as it runs: Ray's processes, real HTTP, and engines that only last."""

import signal
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fleet.in_process import write_profile
from tests.server.launch import ServerProcess, wait_until

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]

_ENGINE = "legato_lab.simulation.engine_process"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[ServerProcess]:
    flags = ["--prefill-replicas", "1", "--decode-replicas", "1", "--replica-cpus", "0.1"]
    flags += ["--simulate", write_profile(tmp_path), "--itl-slo", "500ms"]
    server = ServerProcess(flags, tmp_path / "fleet.log", command="fleet")
    try:
        yield server
        server.process.send_signal(signal.SIGTERM)  # Ray's processes end with it
        assert server.process.wait(60) == 0, server.log.read_text()
    finally:
        server.stop()


def engines(fleet: ServerProcess) -> dict[str, psutil.Process]:
    """Of the two replicas; key the pool, whose name Ray gives their processes."""
    below = psutil.Process(fleet.process.pid).children(recursive=True)
    found = [process for process in below if _ENGINE in process.cmdline()]
    return {_pool(engine): engine for engine in found}


def _pool(engine: psutil.Process) -> str:
    parent = engine.parent()
    assert parent is not None
    [title] = parent.cmdline()[:1]
    return next(name for name in ("prefill", "decode") if name in title)


def num_cached(fleet: ServerProcess, word: str) -> int:
    """The 60 or more tokens of a prompt that no other request has."""
    body = {"prompt": f"{word} " * 60, "max_tokens": 5, "ignore_eos": True}
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == httpx.codes.OK, answer.text
    count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_one_pool_computes_prompts_and_the_other_continues_them(fleet: ServerProcess) -> None:
    wait_until(lambda: len(engines(fleet)) == 2, "they never both came")
    numbers = count()

    def handed_over() -> bool:
        return num_cached(fleet, f"Number {next(numbers)}") >= 32

    wait_until(handed_over, "nothing is handed over")
    assert handed_over()
    prefill = engines(fleet)["prefill"]
    replica = prefill.parent()
    assert replica is not None
    replica.kill()
    assert not handed_over(), "it is gone, and the answer comes all the same"
    wait_until(handed_over, "Ray started no other replica")
