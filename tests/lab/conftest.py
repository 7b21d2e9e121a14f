from collections.abc import Iterator

import pytest

from legato.lab.load.client import Address
from tests.server.launch import ServerProcess, running_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    # No drafts, so that tokens come one by one, and each has a time of its own.
    flags = ("--api-key", "secret", "--max-model-len", "2048", "--speculative", "off")
    with running_server(tmp_path_factory.mktemp("bench"), *flags) as process:
        yield process


@pytest.fixture(scope="session")
def address(server: ServerProcess) -> Address:
    return Address(base_url=server.url, api_key="secret")
