"""Other projects' routers in front of two servers: `vllm-router` and `sglang-router`."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import openai
import pytest

from tests.api.launch import MODEL, ServerProcess, free_port, running_server, wait_until

pytestmark = pytest.mark.fleet

ANY_PORT = "tcp://127.0.0.1:*"
# Of several blocks each, and none like another's.
APPLES, BEARS, CAVES = ("".join(f"{i} {word}, " for i in range(40)) for word in "abc")


def needs(package: str) -> pytest.MarkDecorator:
    """Skips a test before its servers are started."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    pytest.importorskip("zmq", reason="pyzmq is not installed")
    events = ("--kv-events-endpoint", ANY_PORT, "--kv-events-replay-endpoint", ANY_PORT)
    with ExitStack() as stack:
        folders = [tmp_path_factory.mktemp("server") for _ in range(2)]
        yield [stack.enter_context(running_server(folder, *events)) for folder in folders]


@contextmanager
def running_router(
    module: str, servers: list[ServerProcess], log: Path, *flags: str
) -> Iterator[openai.OpenAI]:
    """A client of it, once it takes requests."""
    port, metrics_port = free_port(), free_port()
    command = [
        sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-port", str(metrics_port), "--worker-startup-check-interval", "1",
        "--worker-urls", *(server.url for server in servers), *flags,
    ]  # fmt: skip
    with log.open("w") as output:
        router = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_answered(f"{url}/v1/models"), f"see {log}")
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    finally:
        router.kill()
        router.wait()


def is_answered(url: str) -> bool:
    try:
        return httpx.get(url).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def ask(client: openai.OpenAI, text: str) -> None:
    completion = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=1
    )
    assert completion.choices[0].finish_reason == "length"


def num_served(servers: list[ServerProcess]) -> list[float]:
    return [server.metric("request_success_total") for server in servers]


def went_to(client: openai.OpenAI, servers: list[ServerProcess], text: str) -> int:
    """Which of the servers a request is sent to."""
    before = num_served(servers)
    ask(client, text)
    grown = [now - then for now, then in zip(num_served(servers), before, strict=True)]
    assert sorted(grown) == [0, 1]
    return grown.index(1)


@needs("vllm_router")
def test_vllm_router_sends_a_prompt_to_where_it_is_cached(
    servers: list[ServerProcess], tmp_path: Path
) -> None:
    for server, text in zip(servers, (APPLES, BEARS), strict=True):
        ask(server.openai(), text)  # before there is a router
    module = "vllm_router.launch_router"
    with running_router(module, servers, tmp_path / "log", "--policy", "kv_aware") as client:
        for _ in range(2):
            assert went_to(client, servers, APPLES + "Why?") == 0
            assert went_to(client, servers, BEARS + "Why?") == 1
        ask(servers[0].openai(), CAVES)  # behind its back
        wait_until(lambda: went_to(client, servers, CAVES) == 0, "it was not told")
        assert went_to(client, servers, CAVES + "Why?") == 0


@needs("sglang_router")
@pytest.mark.parametrize("policy", ["cache_aware", "round_robin"])
def test_sglang_router_serves_by_it(
    servers: list[ServerProcess], tmp_path: Path, policy: str
) -> None:
    module = "sglang_router.launch_router"
    with running_router(module, servers, tmp_path / "log", "--policy", policy) as client:
        places = [went_to(client, servers, APPLES + f"{policy}, twice.") for _ in range(2)]
        assert (places[0] == places[1]) is (policy == "cache_aware")
        stream = client.completions.create(model=MODEL, prompt="Hi", max_tokens=3, stream=True)
        assert sum(len(chunk.choices[0].text) for chunk in stream) > 0
        response = client.responses.create(model=MODEL, input="Hi", max_output_tokens=2)
        assert response.usage is not None
        assert response.usage.output_tokens == 2
