"""A small part of what `python -m tests.fuzz` does for long; how long others wait is told there."""

from collections import Counter

import pytest

from tests.api.launch import ServerProcess
from tests.api.servers import Servers
from tests.fuzz.large import overwhelm
from tests.fuzz.large_bodies import LARGE
from tests.profiles import scaled

_MAX_BODY_BYTES = 256 * 2**10
_NUM_BODIES = scaled(len(LARGE) + 8)


@pytest.mark.endurance
def test_no_large_body_harms_the_server(target: ServerProcess) -> None:
    told: Counter[str] = Counter()
    for seed in range(_NUM_BODIES):
        try:
            told += overwhelm(target, seed, _MAX_BODY_BYTES)[1]
        except Exception as error:
            raise AssertionError(f"with seed {seed}") from error
    assert {"200", "400", "413"} <= set(told)
    target.wait_for_metric("num_requests_running", 0)
    assert target.http.get("/health").json()["status"] == "ok"
    assert "Traceback" not in target.log.read_text()


def test_readers_that_retire_lose_no_body(servers: Servers) -> None:
    """Sixteen bodies of 8 MiB at once: a reader ends after one, while others wait for a place."""
    server = servers.get()
    assert set(overwhelm(server, 47)[1]) <= {"400", "429"}
