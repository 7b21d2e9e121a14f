"""`serve run legato.fleet:app` as it runs: behind Ray's proxies, deployed anew under load."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from legato.core.errors import ConfigError
from tests.api.launch import free_port, wait_until
from tests.fleet.in_process import write_profile

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]

_PATIENCE = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
"""With a machine that others use."""


class Deployed:
    """Ray on this machine, with the app on it; `deploy` deploys it anew."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = (folder / "serve.log").open("w")
        self._settings = {
            "replicas": "2",
            "replica_cpus": "0.1",
            "simulate": write_profile(folder),
            "itl_slo_s": "0.5",
        }
        self._script = folder / "deploy.py"
        self._script.write_text(_SCRIPT)
        self._process = subprocess.Popen(
            [sys.executable, str(self._script), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **_PATIENCE},
        )

    def deploy(self, **settings: str) -> None:
        self._settings |= settings
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(self._settings) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("deployed"):
                return
        raise AssertionError(Path(self._log.name).read_text())

    def completed(self, prompt: str, max_tokens: int, **headers: str) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=180, headers=headers)

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._log.close()


_SCRIPT = """
import json, sys
import ray
from ray import serve
from legato.fleet import app

ray.init(
    include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1", num_cpus=8
)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
for line in sys.stdin:
    serve.run(app(json.loads(line)), name="legato")
    print("deployed", flush=True)
serve.shutdown()
ray.shutdown()
"""


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    deployed = Deployed(tmp_path_factory.mktemp("serve"))
    try:
        deployed.deploy()
        yield deployed
    finally:
        deployed.stop()


def num_tokens(url: str, max_tokens: int, has_begun: threading.Event) -> int:
    """Of a stream, once it has come to its end."""
    body = {"prompt": "Go on", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=180) as stream:
        lines: list[str] = []
        for line in stream.iter_lines():
            has_begun.set()
            lines += [line.removeprefix("data: ")] if line else []
    assert lines[-1] == "[DONE]", lines[-2:]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert all("choices" in chunk for chunk in chunks), chunks[-1]
    return sum(bool(chunk["choices"]) for chunk in chunks)


def test_an_answer_has_one_id(deployed: Deployed) -> None:
    answer = deployed.completed("Tell", 3)
    [request_id] = answer.headers.get_list("x-request-id")
    assert answer.json()["id"] == f"cmpl-{request_id}"
    answer = deployed.completed("Tell", 3, **{"X-Request-Id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert "mine" not in answer.json()["id"]


def test_settings_are_deployed(deployed: Deployed) -> None:
    answer = httpx.patch(f"{deployed.url}/settings", json={"itl_slo_s": 0.1}, timeout=60)
    assert answer.status_code == 400
    assert "deploy them again" in answer.json()["error"]["message"]


def test_what_has_no_place_behind_proxies_is_refused_by_name() -> None:
    from legato.fleet import app

    for settings, words in (
        ({"port": "9"}, "port: of Ray Serve's proxies"),
        ({"kv_events_endpoint": "tcp://127.0.0.1:9"}, "kv_events_endpoint: of one engine"),
        ({"bogus": "1"}, "no such setting: bogus"),
    ):
        with pytest.raises(ConfigError, match=words):
            app(settings)


def test_replicas_are_replaced_under_load_and_no_stream_is_lost(deployed: Deployed) -> None:
    has_begun = threading.Event()
    with ThreadPoolExecutor(6) as threads:
        streamed = threads.submit(num_tokens, deployed.url, 1500, has_begun)
        assert has_begun.wait(60)
        redeployed = threads.submit(deployed.deploy, itl_slo_s="0.4")
        answers = []
        while not redeployed.done():
            answers += threads.map(lambda i: deployed.completed(f"Tell {i}", 5), range(3))
        redeployed.result()
        assert streamed.result() == 1500
    assert {answer.status_code for answer in answers} == {200}
    assert deployed.completed("And now", 5).status_code == 200

    def is_new() -> bool:
        settings = httpx.get(f"{deployed.url}/settings", timeout=60).json()
        return bool(settings["asked"]["itl_slo_s"] == 0.4)

    wait_until(is_new, "the new settings are not served")
