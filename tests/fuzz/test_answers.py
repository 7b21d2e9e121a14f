"""A small part of what `python -m tests.fuzz` does for long; how long others wait is told there."""

from collections import Counter

import pytest

from tests.api.launch import ServerProcess
from tests.fuzz.answers import REQUESTS, ask
from tests.fuzz.pipelines import KINDS, send_pipelines
from tests.profiles import scaled

_NUM_ANSWERS, _NUM_PIPELINES = scaled(15), scaled(10)


@pytest.mark.endurance
def test_no_answer_that_is_asked_for_harms_the_server(target: ServerProcess) -> None:
    kinds: Counter[str] = Counter()
    told: Counter[str] = Counter()
    for seed in range(_NUM_ANSWERS):
        try:
            kind, answers = ask(target, seed)
        except Exception as error:
            raise AssertionError(f"with seed {seed}") from error
        kinds[kind.split()[0]] += 1
        told += answers
    assert len(kinds) > len(REQUESTS) / 2
    assert any(answer.startswith("200") for answer in told)
    target.wait_for_metric("num_requests_running", 0)
    assert target.http.get("/health").json()["status"] == "ok"
    assert "Traceback" not in target.log.read_text()


@pytest.mark.endurance
def test_no_pipeline_harms_the_server(target: ServerProcess) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(_NUM_PIPELINES):
        try:
            kinds[send_pipelines(target, seed)[0].split()[0]] += 1
        except Exception as error:
            raise AssertionError(f"with seed {seed}") from error
    assert set(kinds) == set(KINDS)
    target.wait_for_metric("num_requests_running", 0)
    assert target.http.get("/health").json()["status"] == "ok"
    assert "Traceback" not in target.log.read_text()
