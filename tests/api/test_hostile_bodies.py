"""A body that takes long to read delays no other request."""

import contextlib
import json
from collections.abc import Callable, Iterator

import httpx
import psutil
import pytest

from tests.api.launch import ServerProcess, running_server, wait_until
from tests.api.prober import Prober, probing

_NUM_TRIES = 3
_MAX_DELAY_S = 0.15
_KEPT_BYTES = 64 * 2**20

_HI = {"role": "user", "content": "Hi"}


def _many(path: str, name: str, item: bytes, count: int) -> tuple[str, bytes]:
    fields = b'"prompt":"Hi",' if path == "/v1/completions" else b""
    return path, b"{%b%b:[%b%b]}" % (fields, json.dumps(name).encode(), (item + b",") * count, item)


HOSTILE: dict[str, Callable[[], tuple[str, bytes]]] = {
    "2,600,000 messages": lambda: _many("/v1/chat/completions", "messages", b"{}", 2_600_000),
    "1,000,000 messages": lambda: _many("/v1/chat/completions", "messages", b"{}", 500_000),
    "33,000 messages": lambda: _many("/v1/chat/completions", "messages", b"{}", 33_000),
    "2,700,000 stops": lambda: _many("/v1/completions", "stop", b"1", 2_700_000),
    "1,000,000 stops": lambda: _many("/v1/completions", "stop", b"1", 1_000_000),
    "300,000 parts": lambda: (
        "/v1/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": [{}] * 300_000}]}).encode(),
    ),
    "500,000 biases": lambda: (
        "/v1/completions",
        json.dumps({"prompt": "Hi", "logit_bias": dict.fromkeys(range(500_000), "x")}).encode(),
    ),
    "100,000 fields": lambda: (
        "/v1/completions",
        json.dumps({f"x{i}": 1 for i in range(100_000)}).encode(),
    ),
    "100,000 real messages": lambda: (
        "/v1/chat/completions",
        json.dumps({"messages": [_HI] * 100_000}).encode(),
    ),
    "a text of 7.5 MB": lambda: ("/tokenize", json.dumps({"prompt": "word " * 1_500_000}).encode()),
    "a string without an end": lambda: ("/tokenize", b'{"prompt":"' + b'\\",' * 1_000_000),
    "brackets": lambda: ("/tokenize", b"[" * 7_000_000),
    "1,000,000 token ids": lambda: (
        "/v1/completions",
        json.dumps({"prompt": [5] * 1_000_000}).encode(),
    ),
}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("attacked"), is_forked=False) as server:
        yield server


@pytest.fixture(scope="module")
def prober(attacked: ServerProcess) -> Iterator[Prober]:
    with probing(attacked) as prober:
        yield prober


def delays_nobody(
    prober: Prober, attack: Callable[[], object], *, is_computed: bool = False
) -> bool:
    """Whether no client waits for it; a machine that is busy otherwise gets another chance.

    Args:
        is_computed: whether steps hold it, which streams do wait for.
    """
    for _ in range(_NUM_TRIES):
        usual_health_s, usual_stream_s = prober.worst_s()
        attack()
        health_s, stream_s = prober.worst_s()
        if health_s < _MAX_DELAY_S + 2 * usual_health_s and (
            is_computed or stream_s < _MAX_DELAY_S + 2 * usual_stream_s
        ):
            return True
    return False


@pytest.mark.parametrize("name", HOSTILE)
def test_what_takes_long_to_read_holds_up_nobody(
    attacked: ServerProcess, prober: Prober, name: str
) -> None:
    path, body = HOSTILE[name]()

    def attack() -> None:
        headers = {"Content-Type": "application/json"}
        response = attacked.http.post(path, content=body, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"

    assert delays_nobody(prober, attack)


def test_a_text_that_is_long_but_right_holds_up_nobody(
    attacked: ServerProcess, prober: Prober
) -> None:
    def attack() -> None:
        answer = attacked.http.post("/tokenize", json={"prompt": "word " * 80_000}).json()
        assert len(answer["tokens"]) == answer["count"] > 80_000

    assert delays_nobody(prober, attack)


def test_hundreds_of_prompts_hold_up_nobody(attacked: ServerProcess, prober: Prober) -> None:
    prompts = [[i, *[5] * 900] for i in range(400)]

    def attack() -> None:
        with pytest.raises(httpx.ReadTimeout):  # and so the client goes away
            attacked.http.post("/v1/completions", json={"prompt": prompts}, timeout=1.0)

    assert delays_nobody(prober, attack, is_computed=True)
    attacked.wait_for_metric("num_requests_running", 1)


def _resident_bytes(process: psutil.Process) -> int:
    """Return a process's own pages and its part of shared ones; 0 if it has ended."""
    with contextlib.suppress(psutil.Error):
        return int(process.memory_full_info().pss)
    return 0


def test_memory_comes_back(attacked: ServerProcess) -> None:
    def num_bytes() -> int:
        """Memory of the processes together; a page that they share counts once."""
        server = psutil.Process(attacked.process.pid)
        processes = (server, *server.children(recursive=True))
        return sum(_resident_bytes(process) for process in processes)

    attacked.http.post("/tokenize", json={"prompt": "Hi"})
    before = num_bytes()
    for name in ("2,600,000 messages", "1,000,000 messages", "a text of 7.5 MB"):
        path, body = HOSTILE[name]()
        attacked.http.post(path, content=body, headers={"Content-Type": "application/json"})
    wait_until(lambda: num_bytes() < before + _KEPT_BYTES, "memory is kept")
