"""A small part of what `python -m tests.fuzz --only settings` does for long."""

from collections import Counter

import pytest

from tests.api.launch import ServerProcess
from tests.fuzz.settings import change_settings
from tests.profiles import scaled


@pytest.mark.endurance
def test_no_settings_harm_the_server(target: ServerProcess) -> None:
    engine = target.engine.pid
    told: Counter[str] = Counter()
    for seed in range(scaled(15)):
        try:
            told += change_settings(target, seed)[1]
        except Exception as error:
            raise AssertionError(f"with seed {seed}") from error
    assert set(told) == {"200", "400"}
    assert target.engine.pid == engine
    assert target.http.get("/health").json()["status"] in ("ok", "degraded")
    assert "Traceback" not in target.log.read_text()
