"""Prompts are computed by one server and continued by another, which NIXL joins."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from psutil import CONN_LISTEN

from legato.engine.client.kv_tickets import signature
from legato.transfer.nixl_mover import nixl_package
from tests.api.launch import ServerProcess, free_port, running_server, wait_until
from tests.exact import EXACT

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(nixl_package() is None, reason="needs NIXL: legato-llm[disaggregated]"),
]

PROMPT = "The orchestra tuned its instruments, one after the other. " * 30
BODY = {"model": "any", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "seed": 1}
LEASE_S = 5.0
_HITS = "prefix_cache_hits_total"
_USAGE = "kv_cache_usage_perc"
_BYTES = "kv_transfer_bytes_total"


def flags(role: str, key: Path) -> list[str]:
    """What a server that prefills keeps is soon given up; one that decodes is patient."""
    sends = ("--kv-transfer-port", str(free_port()), "--kv-lease", f"{LEASE_S}s")
    return [
        *("--kv-role", role, "--kv-transfer-key-file", str(key)),
        *(sends if role == "prefill" else ()),
        *("--served-model-name", "any", *EXACT, "--max-num-batched-tokens", "64"),
    ]


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text("sixteen bytes or more of it")
    return path


@pytest.fixture(scope="module")
def prefill(key: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("server"), *flags("prefill", key)) as running:
        yield running


@pytest.fixture(scope="module")
def decode(key: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("server"), *flags("decode", key)) as running:
        yield running


def complete(asked: ServerProcess, **fields: Any) -> dict[str, Any]:
    response = asked.http.post("/v1/completions", json=BODY | fields)
    assert response.status_code == httpx.codes.OK, response.text
    answer: dict[str, Any] = response.json()
    return answer


def prefilled(prefill: ServerProcess, **fields: Any) -> dict[str, Any]:
    """A router's ticket for a prompt that was computed for it."""
    answer = complete(
        prefill, max_tokens=1, kv_transfer_params={"do_remote_decode": True}, **fields
    )
    ticket: dict[str, Any] = answer["kv_transfer_params"]
    return ticket


def made_up(prefill: ServerProcess, key: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a router with the key tells the server that prefills, and the one that decodes."""
    told = prefilled(prefill, **salted("any"))
    host, port = told["remote_host"], told["remote_port"]
    ticket = {
        "do_remote_prefill": True,
        "is_early": True,
        "remote_host": host,
        "remote_port": port,
        "transfer_id": name,
        "signature": signature(key.read_bytes(), host, port, name),
    }
    return {"do_remote_decode": True, "transfer_id": name}, ticket


def text(answer: dict[str, Any]) -> str:
    told: str = answer["choices"][0]["text"]
    return told


def num_cached(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def salted(name: str) -> dict[str, Any]:
    """A prompt that no request has had before."""
    return {"cache_salt": name}


def test_it_goes_on_as_if_one_server_did_both(
    prefill: ServerProcess, decode: ServerProcess
) -> None:
    alone = complete(prefill, **salted("alone"))
    ticket = prefilled(prefill, **salted("both"))
    answer = complete(decode, kv_transfer_params=ticket, **salted("both"))
    assert text(answer) == text(alone)
    num_prompt = answer["usage"]["prompt_tokens"]
    assert num_prompt - 33 <= num_cached(answer) < num_prompt
    assert answer["kv_transfer_params"] is None


def test_a_router_with_the_key_asks_both_at_once(
    prefill: ServerProcess, decode: ServerProcess, key: Path
) -> None:
    """The one that decodes hears of it first, and fetches while the other one computes."""
    alone = complete(prefill, **salted("alone"))
    asked, ticket = made_up(prefill, key, "made up by the router")
    with ThreadPoolExecutor() as pool:
        fields = salted("early")
        answer = pool.submit(complete, decode, kv_transfer_params=ticket, **fields)
        complete(prefill, max_tokens=1, kv_transfer_params=asked, **fields)
        assert text(answer.result()) == text(alone)
    assert num_cached(answer.result()) >= answer.result()["usage"]["prompt_tokens"] - 33


def test_what_nobody_fetches_is_let_go_of(prefill: ServerProcess) -> None:
    prefilled(prefill, **salted("never"))
    assert prefill.metric(_USAGE) > 0
    prefill.wait_for_metric(_USAGE, 0.0)


def test_engines_sleep_while_there_is_nothing_to_move(
    prefill: ServerProcess, decode: ServerProcess
) -> None:
    """NIXL's own thread, which is not needed, takes a core for itself."""
    complete(decode, kv_transfer_params=prefilled(prefill, **salted("sleep")), **salted("sleep"))
    prefill.wait_for_metric("kv_transfer_leases", 0.0)
    used_s = [cpu_s(server) for server in (prefill, decode)]
    time.sleep(2.0)
    for server, before_s in zip((prefill, decode), used_s, strict=True):
        assert cpu_s(server) - before_s < 1.0


def cpu_s(server: ServerProcess) -> float:
    times = server.engine.cpu_times()
    return float(times.user + times.system)


def test_a_ticket_that_was_changed_is_refused(
    prefill: ServerProcess, decode: ServerProcess
) -> None:
    ticket = prefilled(prefill, **salted("changed"))
    for change in ({"remote_port": 1}, {"transfer_id": "x"}, {"remote_host": "192.0.2.1"}):
        body = BODY | {"kv_transfer_params": ticket | change}
        response = decode.http.post("/v1/completions", json=body)
        assert response.status_code == httpx.codes.BAD_REQUEST
        assert response.json()["error"]["param"] == "kv_transfer_params"


def test_a_prefill_that_is_gone_costs_a_computation(
    key: Path, decode: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with running_server(tmp_path_factory.mktemp("server"), *flags("prefill", key)) as dying:
        ticket = prefilled(dying, **salted("gone"))
        alone = complete(dying, **salted("alone"))
        dying.engine.send_signal(signal.SIGKILL)
        answer = complete(decode, kv_transfer_params=ticket, **salted("gone"))
    assert text(answer) == text(alone)
    assert num_cached(answer) == 0


@pytest.mark.parametrize("killed", ["prefill", "decode"])
def test_an_engine_killed_while_blocks_are_moved_costs_a_computation(
    prefill: ServerProcess, decode: ServerProcess, key: Path, killed: str
) -> None:
    """Either is started again, and is sent again what it had; nothing stays held on the other."""
    long = {"prompt": PROMPT * 5}
    alone = complete(prefill, **long, **salted("alone"))
    asked, ticket = made_up(prefill, key, f"{killed} is killed")
    fields = long | salted(killed)
    before = decode.metric(_BYTES)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(complete, decode, kv_transfer_params=ticket, **fields)
        sent = {"max_tokens": 1, "kv_transfer_params": asked}
        computed = pool.submit(complete, prefill, **sent, **fields)
        wait_until(lambda: decode.metric(_BYTES) > before, "nothing is fetched")
        assert not computed.done(), "it is over already"
        (prefill if killed == "prefill" else decode).engine.send_signal(signal.SIGKILL)
        assert text(answer.result()) == text(alone)
        computed.result()
    for server in (prefill, decode):
        server.wait_for_metric(_USAGE, 0.0)
    prefill.wait_for_metric("kv_transfer_leases", 0.0)


@contextmanager
def routed(prefill: ServerProcess, decode: ServerProcess, log: Path) -> Iterator[httpx.Client]:
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        *(sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1"),
        *("--vllm-pd-disaggregation", "--worker-startup-check-interval", "1"),
        *("--port", url.rpartition(":")[2], "--prometheus-port", str(free_port())),
        *("--prefill", prefill.url, "--decode", decode.url),
    ]
    with log.open("w") as file, httpx.Client(base_url=url, timeout=60.0) as client:
        router = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            wait_until(lambda: is_up(client), f"no router: {log.read_text()}")
            yield client
        finally:
            router.kill()
            router.wait()


def is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == httpx.codes.OK
    except httpx.HTTPError:
        time.sleep(0.1)
        return False


@pytest.mark.skipif(find_spec("vllm_router") is None, reason="vllm-router is not installed")
def test_vllms_router_drives_it(
    prefill: ServerProcess, decode: ServerProcess, tmp_path: Path
) -> None:
    alone = complete(prefill, **salted("alone"))
    with routed(prefill, decode, tmp_path / "router.log") as client:
        before = decode.metric(_HITS)
        response = client.post("/v1/completions", json=BODY | salted("routed"))
        assert response.status_code == httpx.codes.OK, response.text
        answer = response.json()
        assert text(answer) == text(alone)
        # The router tells what the first server had cached, which is nothing.
        assert decode.metric(_HITS) - before >= answer["usage"]["prompt_tokens"] - 33
        messages = [{"role": "user", "content": "Say hello, at length."}]
        chat = {"model": "any", "messages": messages, "max_tokens": 8, "stream": True}
        streamed = client.post("/v1/chat/completions", json=chat)
        assert streamed.status_code == httpx.codes.OK, streamed.text
        assert streamed.text.rstrip().endswith("data: [DONE]")


def test_nothing_listens_beyond_this_machine(prefill: ServerProcess, decode: ServerProcess) -> None:
    """NIXL's sockets do not, either."""
    complete(decode, kv_transfer_params=prefilled(prefill, **salted("near")), **salted("near"))
    for running in (prefill, decode):
        opened = running.engine.net_connections("inet")
        assert {found.laddr.ip for found in opened if found.status == CONN_LISTEN} == {"127.0.0.1"}
