from collections.abc import Iterator

import pytest

from tests.fuzz.clients import FLAGS
from tests.server.launch import ServerProcess, running_server


@pytest.fixture(scope="package")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("fuzz"), *FLAGS) as process:
        yield process
