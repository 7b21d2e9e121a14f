import pytest

from legato_lab.load.client import Address
from tests.api.launch import ServerProcess
from tests.api.servers import Servers


@pytest.fixture(scope="module")
def server(servers: Servers) -> ServerProcess:
    # No server drafts by default here, so that each token has a time of its own.
    return servers.get("--api-key", "secret", "--max-model-len", "2048")


@pytest.fixture(scope="module")
def address(server: ServerProcess) -> Address:
    return Address(base_url=server.url, api_key="secret")
