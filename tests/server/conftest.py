from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.server.launch import ServerProcess, running_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    # float32, so that an output hardly depends on what else is in the batch.
    with running_server(tmp_path_factory.mktemp("server"), "--dtype", "float32") as process:
        yield process


@pytest.fixture
def http(server: ServerProcess) -> httpx.Client:
    return server.http


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return server.openai()
