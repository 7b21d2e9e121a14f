"""Starts a real server in a process of its own and looks at it from outside."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.forks.process import runs
from tests.forks.start import Process, start

MODEL = "smollm2-135m-instruct"
_PATIENCE_S = 60.0
# One thread, because threads that wait for each other crawl on a busy machine.
# And without drafts, because most tests count a chunk a token; test_drafts and others turn them on.
FLAGS = ("--kv-cache-memory", "256M", "--num-threads", "1", "--speculative", "off")


class ServerProcess:
    """`legato serve` on a free port.

    Args:
        is_forked: whether the server is a fork of a process that has imported it, which takes a
            third of the processor time; otherwise it is the command as users start it.
        before: called in the new process, before it is the server; it is not forked then.
        command: another of legato's, which serves too.
        program: another module, which takes the flags alone.

    Attributes:
        url: without "/v1".
        http: a client without retries.
    """

    def __init__(
        self,
        flags: list[str],
        log: Path,
        is_forked: bool = True,
        before: Callable[[], object] | None = None,
        command: str = "serve",
        program: str | None = None,
    ) -> None:
        self.log = log
        what = ["legato", command] if program is None else [program]
        arguments = [*what, "--port", "0", *flags]
        output, stdout = os.pipe()
        self._output = os.fdopen(output)
        with log.open("w") as stderr, open(stdout):
            if is_forked and before is None:
                self.process: Process = start(*arguments, stdout=stdout, stderr=stderr.fileno())
            else:
                full = [sys.executable, "-m", *arguments]
                self.process = subprocess.Popen(
                    full, stdout=stdout, stderr=stderr, preexec_fn=before
                )
        self.url = self._read_url()
        self.http = httpx.Client(base_url=self.url, timeout=_PATIENCE_S)

    @property
    def engine(self) -> psutil.Process:
        [engine] = self._processes("legato.engine.main")
        return engine

    @property
    def zygote(self) -> psutil.Process:
        [zygote] = self._processes("legato.api.reading.main")
        return zygote

    def openai(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0)

    def metric(self, name: str, **labels: str) -> float:
        """Value of a sample, 0 where it is not shown yet."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return sum(
            sample.value
            for sample in samples
            if sample.name == f"legato:{name}" and labels.items() <= sample.labels.items()
        )

    def wait_for_metric(self, name: str, value: float, **labels: str) -> None:
        wait_until(lambda: self.metric(name, **labels) == value, f"{name} never became {value}")

    def stop(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait()
        self._output.close()

    def _processes(self, module: str) -> list[psutil.Process]:
        """Child processes that run one program."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if runs(child, module)]

    def _read_url(self) -> str:
        for line in self._output:
            if line.startswith("Legato serves "):
                return line.split(" on ")[1].split()[0]
        raise AssertionError(f"the server did not start:\n{self.log.read_text()}")


@contextmanager
def running_server(tmp_path: Path, *flags: str, **options: Any) -> Iterator[ServerProcess]:
    """Start a server, and stop it in the end. Args: options: arguments of `ServerProcess`."""
    server = ServerProcess([*FLAGS, *flags], tmp_path / "server.log", **options)
    try:
        yield server
    finally:
        server.stop()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_until(condition: Callable[[], bool], failure: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, failure
        time.sleep(0.05)


def long_request(**fields: Any) -> dict[str, Any]:
    """A stream that goes on for as long as a test may need it."""
    return {
        "prompt": "Once upon a time",
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": True,
        **fields,
    }
