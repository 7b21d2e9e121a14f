"""The processes that read bodies: bounded, replaced where they die, and gone with their server."""

import asyncio
import contextlib
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from legato.api import limits
from legato.api.readers.reader_messages import LoadText
from legato.api.readers.zygote_process import ZygoteProcess
from legato.api.reading.reader import serve, time_bound
from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL
from legato.core.errors import ConfigError
from legato.language.tokenizer.loading import TextSource
from legato.language.tokenizer.tokenizer import load_tokenizer
from tests.api.launch import ServerProcess, running_server, wait_until
from tests.forks.start import start

LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
_NUM_SLOW = 8
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def trusting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--trust-request-chat-template", "--timeout-prompt", "500ms")
    with running_server(tmp_path_factory.mktemp("trusting"), *flags, is_forked=False) as server:
        yield server


@pytest.fixture(scope="module")
def looping_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose chat template does not end."""
    folder = tmp_path_factory.mktemp("looping")
    tokenizer = load_tokenizer(resolve_source(DEFAULT_MODEL))
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.pretrained.chat_template = LOOP
    tokenizer.pretrained.save_pretrained(folder)
    return folder


def refusal(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    message: str = response.json()["error"]["message"]
    return message


def chat(server: ServerProcess, **fields: Any) -> httpx.Response:
    return server.http.post("/v1/chat/completions", json={**HI, "max_tokens": 1, **fields})


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_only_the_engine_loads_torch(trusting: ServerProcess) -> None:
    """As the processes' memory maps tell, when each of them has worked."""
    assert chat(trusting).status_code == 200
    server = psutil.Process(trusting.process.pid)
    loads_torch = {
        process
        for process in (server, *server.children(recursive=True))
        if "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
    }
    assert loads_torch == {trusting.engine}


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (LOOP, "processor time"),
        ("{{ 10 ** (10 ** 9) }}", "processor time"),
        ("{{ 'a' * 10 ** 10 }}", "memory"),
        ("{{ messages[0].content * 10 ** 10 }}", "memory"),
        ("{{ messages[0].content * 10 ** 7 }}", "characters"),
    ],
)
def test_a_template_that_takes_too_much_ends_its_own_request(
    trusting: ServerProcess, template: str, why: str
) -> None:
    assert why in refusal(chat(trusting, chat_template=template))
    assert chat(trusting).status_code == 200


def test_others_are_read_beside_templates_that_do_not_end(trusting: ServerProcess) -> None:
    def loop() -> None:
        with httpx.Client(base_url=trusting.url, timeout=60) as http:
            http.post("/tokenize", json={**HI, "chat_template": LOOP})

    threads = [threading.Thread(target=loop) for _ in range(limits.MAX_READERS - 1)]
    for thread in threads:
        thread.start()
    assert chat(trusting).status_code == 200
    for thread in threads:
        thread.join()


def test_slow_bodies_of_one_tenant_leave_places_for_others(tmp_path: Path) -> None:
    """Even small ones: none of the slow ones has been read when another tenant's is."""
    flags = ("--trust-request-chat-template", "--timeout-prompt", "5s", "--api-key", "a=A,b=B")
    with running_server(tmp_path, *flags) as server, ThreadPoolExecutor(_NUM_SLOW) as pool:

        def ask(key: str, **fields: Any) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            with httpx.Client(base_url=server.url, timeout=60, headers=headers) as http:
                return http.post("/tokenize", json={**HI, **fields}).status_code

        slow = [pool.submit(ask, "A", chat_template=LOOP) for _ in range(_NUM_SLOW)]
        wait_until(lambda: _is_busy(server), "nothing is read")
        for _ in range(5):
            assert ask("B") == 200
        assert not any(one.done() for one in slow)
        assert ask("A") == 200, "nor do they hold up quick ones of their own tenant"
        server.stop()


def test_a_stopped_reader_is_killed_and_its_body_read_again(trusting: ServerProcess) -> None:
    """All of them are stopped, so that the next body finds one that is."""
    before = trusting.metric("num_stuck_processes_total", process="reader")
    with ThreadPoolExecutor(1) as pool:
        stopped, asking = _asked_of_stopped_reader(trusting, pool)
        assert _trouble(trusting) == "a process that reads requests does not answer"
        assert asking.result().status_code == 200
    assert not any(reader.is_running() for reader in stopped)
    assert _trouble(trusting) == ""
    assert trusting.metric("num_stuck_processes_total", process="reader") == before + 1
    assert chat(trusting).status_code == 200


def test_a_body_that_only_waits_for_a_processor_is_not_slow(trusting: ServerProcess) -> None:
    """Or a busy machine would lower, end and fork readers, which cost more than the bodies."""
    assert chat(trusting).status_code == 200
    readers = trusting.zygote.children()
    before = {reader.pid: reader.nice() for reader in readers}
    with ThreadPoolExecutor(1) as pool:
        for reader in readers:
            reader.suspend()
        asking = pool.submit(chat, trusting)
        time.sleep(0.3)
        for reader in readers:
            reader.resume()
        assert asking.result().status_code == 200
    assert {reader.pid: reader.nice() for reader in trusting.zygote.children()} == before


def test_a_stopped_zygote_is_replaced(trusting: ServerProcess) -> None:
    zygote = trusting.zygote
    zygote.suspend()
    wait_until(lambda: _trouble(trusting) != "", "/health says that all is well")
    assert chat(trusting).status_code == 200, "its readers go on"
    wait_until(lambda: not zygote.is_running(), "it goes on")
    wait_until(lambda: _trouble(trusting) == "", "no other is started")
    assert trusting.metric("num_stuck_processes_total", process="zygote") == 1
    for reader in trusting.zygote.children():
        reader.kill()
    assert chat(trusting).status_code == 200


def test_a_client_that_leaves_takes_its_reader_along(trusting: ServerProcess) -> None:
    for _ in range(2 * limits.MAX_READERS):
        with pytest.raises(httpx.ReadTimeout):
            trusting.http.post("/tokenize", json={**HI, "chat_template": LOOP}, timeout=0.1)
    assert chat(trusting).status_code == 200


def test_a_reader_that_has_grown_ends_after_its_answer(trusting: ServerProcess) -> None:
    assert "messages" in refusal(chat(trusting, messages=150_000 * HI["messages"]))
    assert chat(trusting).status_code == 200
    wait_until(lambda: _grown_bytes(trusting) < limits.KEPT_MEMORY_BYTES, "memory is kept")


def test_a_reader_whose_client_left_before_it_began_ends() -> None:
    servers_end, readers_end = socket.socketpair()
    servers_end.close()
    reads_nothing: Any = None
    serve(readers_end, reads_nothing, timeout_s=1.0)


def test_a_reader_that_was_killed_is_replaced(trusting: ServerProcess) -> None:
    for _ in range(3):
        for reader in trusting.zygote.children():
            reader.kill()
        assert chat(trusting).status_code == 200


def test_a_zygote_that_was_killed_is_replaced(trusting: ServerProcess) -> None:
    zygote = trusting.zygote
    readers = zygote.children()
    zygote.kill()
    assert chat(trusting).status_code == 200, "its readers go on"
    for reader in readers:
        reader.kill()
    assert chat(trusting).status_code == 200
    assert trusting.zygote.pid != zygote.pid


def test_a_zygote_is_replaced_once_there_are_free_descriptors(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        pid = server.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
        server.zygote.kill()
        wait_until(lambda: "it cannot be started" in server.log.read_text(), "it was not tried")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        wait_until(lambda: "degraded" not in server.http.get("/health").text, "none was started")
        assert chat(server).status_code == 200


def test_what_dies_over_and_over_is_an_error_of_the_server(trusting: ServerProcess) -> None:
    over = threading.Event()

    def keep_killing() -> None:
        while not over.wait(0.05):  # by then it has begun, and reads
            for reader in trusting.zygote.children():
                with contextlib.suppress(psutil.NoSuchProcess):  # its zygote was faster
                    reader.suspend()
                    reader.kill()

    killing = threading.Thread(target=keep_killing)
    killing.start()
    try:
        assert chat(trusting, chat_template=LOOP).status_code == 500
    finally:
        over.set()
        killing.join()
    assert chat(trusting).status_code == 200


def test_a_model_whose_template_loops_serves_completions_and_signals(
    looping_model: Path, tmp_path: Path
) -> None:
    flags = ("--timeout-prompt", "3s", "--trust-request-chat-template")
    with running_server(tmp_path, "--model", str(looping_model), *flags) as server:
        assert "chat template does not work" in server.log.read_text()
        assert "chat template does not work" in refusal(chat(server))
        answer = server.http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1})
        assert answer.status_code == 200

        children = psutil.Process(server.process.pid).children(recursive=True)
        asking = threading.Thread(target=_ask_and_lose, args=(server,))
        asking.start()
        wait_until(lambda: _is_busy(server), "nobody reads")
        for _ in range(2):
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: _is_draining(server), "it does not drain")
        server.process.wait(60)
        asking.join()
    wait_until(lambda: not any(child.is_running() for child in children), "some process goes on")


async def loaded(template: str) -> tuple[str | None, int]:
    """Why a zygote with this template does not load, if so, and how much memory it then has."""
    path = str(resolve_source(DEFAULT_MODEL).path)
    zygote = ZygoteProcess(LoadText(TextSource(path, path, template), 10.0))
    why = None
    try:
        await zygote.loaded()
    except ConfigError as error:
        why = str(error)
    with contextlib.suppress(psutil.NoSuchProcess):
        num_bytes = psutil.Process(zygote._process.pid).memory_info().rss
    await zygote.close()
    return why, num_bytes


@pytest.fixture(scope="module")
def plain_bytes() -> int:
    """What a text process takes whose template has no constant."""
    return asyncio.run(loaded(PLAIN))[1]


@pytest.mark.parametrize(
    "constant",
    [
        "'x' * 1200000000",
        "'x' * 300000000 ~ 'y' * 300000000",
        "[1] * 150000000",
        "('x' * 300000000)[:3]",
        "'%1000000000d' % 1",
    ],
)
def test_a_template_whose_constants_are_huge_takes_no_memory(
    constant: str, plain_bytes: int
) -> None:
    """Also where no conversation ever needs them: Jinja computes constants as it compiles."""
    for template in (f"{{{{ {constant} }}}}", f"{{% if false %}}{{{{ {constant} }}}}{{% endif %}}"):
        why, num_bytes = asyncio.run(loaded(PLAIN + template))
        assert why is None or "chat template does not work" in why
        assert num_bytes < plain_bytes + 2**26


def test_a_bound_on_time_ends_with_its_block() -> None:
    """Or the zygote, which goes on without its template, would be killed later."""
    with contextlib.suppress(MemoryError), time_bound(60.0):
        raise MemoryError
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


@pytest.mark.parametrize("num_chars", [2**10, 2**18, 2**21])
def test_a_template_may_be_long(num_chars: int) -> None:
    """Longer than what a socket takes at once."""
    why, _ = asyncio.run(loaded(f"{{#{'x' * num_chars}#}}{PLAIN}"))
    assert why is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_served_while_a_template_loops_at_the_start(
    looping_model: Path, number: signal.Signals
) -> None:
    flags = ("--port", "0", "--timeout-prompt", "600s")
    process = start("legato", "serve", str(looping_model), *flags, stderr=subprocess.DEVNULL)
    server = psutil.Process(process.pid)

    def trials() -> list[psutil.Process]:
        return [trial for child in server.children() for trial in child.children()]

    try:
        wait_until(lambda: bool(trials()), "nobody tries the template")
        [trial] = trials()
        process.send_signal(number)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not trial.is_running(), "the trial goes on")


def test_all_processes_end_with_a_server_that_is_killed(tmp_path: Path) -> None:
    with running_server(tmp_path, "--trust-request-chat-template") as server:
        asking = threading.Thread(target=_ask_and_lose, args=(server,))
        asking.start()
        wait_until(lambda: _is_busy(server), "nobody reads")
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) >= 3
        server.process.kill()
        asking.join()
        wait_until(lambda: not any(child.is_running() for child in children), "some goes on")


def test_ctrl_c_reaches_only_the_server(trusting: ServerProcess) -> None:
    """A terminal sends it to all processes; it is for the server to say when they end."""
    zygote = trusting.zygote
    processes = [zygote, *zygote.children()]
    for process in processes:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
    assert chat(trusting).status_code == 200
    assert all(process.is_running() for process in processes)


@pytest.mark.parametrize("body", [HI, {**HI, "max_tokens": 1}])
def test_a_byte_order_mark_is_passed_over(trusting: ServerProcess, body: dict[str, Any]) -> None:
    content = b"\xef\xbb\xbf" + json.dumps({**body, "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    response = trusting.http.post("/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 1, "prompt": "b"}', "prompt"),
        ("/v1/completions", b'{"prompt": "a", "\\u0070rompt": "b"}', "prompt"),
        ("/v1/chat/completions",
         b'{"messages": [{"role": "user", "content": "a", "role": "system"}]}', "role"),
        ("/tokenize", b'{"prompt": "{\\"x\\": 1}", "x": {"y": [{"z": 1, "z": 2}]}}', "z"),
        ("/settings", b'{"itl_slo_s": 1, "itl_slo_s": 2}', "itl_slo_s"),
    ],
)  # fmt: skip
def test_a_key_that_comes_twice_is_named(
    trusting: ServerProcess, path: str, body: bytes, key: str
) -> None:
    method = "PATCH" if path == "/settings" else "POST"
    headers = {"Content-Type": "application/json"}
    response = trusting.http.request(method, path, content=body, headers=headers)
    assert f"the key '{key}' twice" in refusal(response)


def _parts(count: int) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": ""}] * count
    return [{"role": "user", "content": content}]


BOUNDS: dict[str, tuple[str, int, Callable[[int], dict[str, Any]]]] = {
    "messages": ("/tokenize", limits.MAX_MESSAGES, lambda n: {
        "messages": [{"role": "user", "content": ""}] * n, "chat_template": "x"}),
    "messages.0.content": ("/tokenize", limits.MAX_CONTENT_PARTS, lambda n: {
        "messages": _parts(n)}),
    "messages.0.name": ("/tokenize", limits.MAX_NAME_CHARS, lambda n: {
        "messages": [{"role": "user", "content": "", "name": "x" * n}]}),
    "chat_template": ("/tokenize", limits.MAX_TEMPLATE_CHARS, lambda n: {
        **HI, "chat_template": "x" * n}),
    "chat_template_kwargs": ("/tokenize", limits.MAX_TEMPLATE_VARIABLES, lambda n: {
        **HI, "chat_template_kwargs": {f"x{i}": 1 for i in range(n)}}),
    "tokens": ("/detokenize", limits.MAX_DETOKENIZED, lambda n: {"tokens": [5] * n}),
    "user": ("/v1/completions", limits.MAX_NAME_CHARS, lambda n: {
        "prompt": "Hi", "max_tokens": 1, "user": "x" * n}),
    "metadata": ("/v1/completions", limits.MAX_METADATA, lambda n: {
        "prompt": "Hi", "max_tokens": 1, "metadata": {str(i): "x" for i in range(n)}}),
    "prompt": ("/tokenize", 8192 * 81, lambda n: {"prompt": "x" * n}),
}  # fmt: skip


@pytest.mark.parametrize("param", BOUNDS)
def test_bounds(trusting: ServerProcess, param: str) -> None:
    path, most, body = BOUNDS[param]
    response = trusting.http.post(path, json=body(most))
    assert response.status_code == 200, response.text
    response = trusting.http.post(path, json=body(most + 1))
    assert response.json()["error"]["param"] == param
    assert re.search(str(most), refusal(response))


def test_values_within_text_count_for_nothing(trusting: ServerProcess) -> None:
    text = ",[{" * (limits.MAX_JSON_VALUES // 2)
    response = trusting.http.post("/tokenize", json={"prompt": text})
    assert "characters" in refusal(response)


def test_a_body_that_is_read_in_place_is_small(trusting: ServerProcess) -> None:
    content = b" " * limits.MAX_PLAIN_BODY_BYTES + b"{}"
    headers = {"Content-Type": "application/json"}
    response = trusting.http.patch("/settings", content=content, headers=headers)
    assert response.status_code == 413
    response = trusting.http.patch("/settings", content=content[2:], headers=headers)
    assert response.status_code == 200


def _asked_of_stopped_reader(
    server: ServerProcess, pool: ThreadPoolExecutor
) -> tuple[list[psutil.Process], "Future[httpx.Response]"]:
    """Readers that were stopped, and a chat that one of them is to read."""
    stopped = server.zygote.children()
    for reader in stopped:
        reader.suspend()
    asking = pool.submit(chat, server)
    wait_until(lambda: asking.done() or _trouble(server) != "", "/health says that all is well")
    if asking.done():  # none was idle, and one was forked
        return _asked_of_stopped_reader(server, pool)
    return stopped, asking


def _trouble(server: ServerProcess) -> str:
    """Why /health says that the server is degraded."""
    health: dict[str, str] = server.http.get("/health").json()
    assert (health["status"] == "degraded") == ("reason" in health)
    return health.get("reason", "")


def _ask_and_lose(server: ServerProcess) -> None:
    try:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            http.post("/tokenize", json={**HI, "chat_template": LOOP})
    except httpx.HTTPError:
        pass


def _grown_bytes(server: ServerProcess) -> int:
    """By how much the largest reader has more resident than the smallest."""
    held = [int(reader.memory_info().rss) for reader in server.zygote.children()]
    return max(held) - min(held)


def _is_busy(server: ServerProcess) -> bool:
    """Whether a reader computes."""
    before = {reader.pid: reader.cpu_times().user for reader in server.zygote.children()}
    time.sleep(0.2)
    return any(
        reader.cpu_times().user > before.get(reader.pid, 0.0) + 0.02
        for reader in server.zygote.children()
    )


def _is_draining(server: ServerProcess) -> bool:
    try:
        return server.http.get("/health").status_code == 503
    except httpx.HTTPError:  # it is gone already
        return True
