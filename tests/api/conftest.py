import httpx
import openai
import pytest

from tests.api.launch import ServerProcess
from tests.api.servers import PROMISING, Servers
from tests.exact import EXACT


@pytest.fixture(scope="module")
def server(servers: Servers) -> ServerProcess:
    return servers.get(*EXACT)


@pytest.fixture(scope="module")
def watched(servers: Servers) -> ServerProcess:
    """With SLOs that it keeps, that it misses, and that it refuses."""
    return servers.get(*PROMISING)


@pytest.fixture
def http(server: ServerProcess) -> httpx.Client:
    return server.http


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return server.openai()
