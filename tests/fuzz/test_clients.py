"""A small part of what `python -m tests.fuzz` does for long."""

import random
from collections import Counter

import pytest

from tests.api.launch import ServerProcess
from tests.fuzz.clients import CLIENTS, attack
from tests.profiles import scaled

_NUM_CLIENTS = scaled(250)


@pytest.mark.endurance
def test_no_client_harms_the_server(target: ServerProcess) -> None:
    engine = target.engine.pid
    told: Counter[str] = Counter()
    for seed in range(_NUM_CLIENTS):
        try:
            told += attack(target, random.Random(seed))
        except Exception as error:
            raise AssertionError(f"with seed {seed}") from error
    assert {name.split()[0] for name in told} == {client.__name__ for client in CLIENTS}
    assert told["send_json 200"] > _NUM_CLIENTS / 10
    target.wait_for_metric("num_requests_running", 0)
    assert target.metric("kv_cache_usage_perc") == 0
    assert target.engine.pid == engine
    assert target.http.get("/health").json()["status"] == "ok"
    assert "Traceback" not in target.log.read_text()
