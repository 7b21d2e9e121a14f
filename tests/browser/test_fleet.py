"""The dashboard of a fleet: a lane of steps for each replica."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.background import BackgroundStream
from tests.api.launch import ServerProcess
from tests.fleet.in_process import write_profile
from tests.fleet.server import launched

pytestmark = pytest.mark.browser

_PATIENCE_MS = 60_000


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[ServerProcess]:
    server = launched(tmp_path, write_profile(tmp_path), "--itl-slo", "500ms")
    try:
        yield server
    finally:
        server.stop()


def test_each_replica_has_a_lane(fleet: ServerProcess, tab: Any, tmp_path: Path) -> None:
    complaints: list[str] = []
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("console", lambda message: complaints.append(message.text))
    tab.goto(f"{fleet.url}/dashboard")
    streams = [BackgroundStream(fleet), BackgroundStream(fleet)]
    tab.locator("#num-running").filter(has_text="2").wait_for(timeout=_PATIENCE_MS)
    tab.wait_for_function(
        "() => document.getElementById('steps').ariaLabel.includes('steps of 2 replicas, last: 1')",
        timeout=_PATIENCE_MS,
    )
    tab.screenshot(path=tmp_path / "fleet.png")
    for stream in streams:
        stream.join()
        assert stream.is_complete
    assert complaints == []
