from collections.abc import Iterator

import pytest

from tests.api.launch import ServerProcess, running_server
from tests.fuzz.clients import FLAGS


@pytest.fixture(scope="package")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("fuzz"), *FLAGS) as process:
        yield process
