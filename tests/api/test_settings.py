"""GET and PATCH /settings."""

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from legato.api.operations.settings import SettingsPatch
from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from tests.api.background import BackgroundStream
from tests.api.launch import ServerProcess
from tests.api.watch import steps, watching
from tests.profiles import examples

AUTO = {
    "policy": "stall-free", "max_num_batched_tokens": None, "enable_chunked_prefill": True,
    "prefill_order": "slowdown", "max_wait_s": 10.0, "itl_slo_s": "auto", "itl_slo_quantile": 0.99,
    "tpot_slo_s": None, "ttft_slo_s": None, "speculative": "auto",
}  # fmt: skip
MOST = 8192 + 64
SECONDS = ("itl_slo_s", "tpot_slo_s", "ttft_slo_s", "max_wait_s")


@pytest.fixture(autouse=True)
def given_back(http: httpx.Client) -> Iterator[None]:
    http.patch("/settings", json={"speculative": None}).raise_for_status()
    yield
    as_started = {**dict.fromkeys(AUTO), "speculative": "off"}
    http.patch("/settings", json=as_started).raise_for_status()


def test_what_was_asked_for_and_what_became_of_it(http: httpx.Client) -> None:
    resolved = {**AUTO, "max_num_batched_tokens": 512, "itl_slo_s": None}
    expected = {"asked": AUTO, "resolved": resolved, "most_batched_tokens": MOST}
    assert http.get("/settings").json() == expected
    told = http.patch("/settings", json={"itl_slo_s": 0.5, "ttft_slo_s": 2}).json()
    assert told["asked"] == {**AUTO, "itl_slo_s": 0.5, "ttft_slo_s": 2.0}
    assert told["resolved"]["max_num_batched_tokens"] == 2048
    assert told == http.get("/settings").json()
    assert http.patch("/settings", json={"itl_slo_s": None, "ttft_slo_s": None}).json() == expected


@pytest.mark.parametrize(
    ("started", "asked", "expected"),
    [
        ({"bounds_gaps": True}, None, "auto"),
        ({"itl_slo_s": 0.1}, None, "auto"),
        ({}, None, "off"),
        ({}, "auto", "auto"),
        ({"bounds_gaps": True}, "off", "off"),
        ({"itl_slo_s": 0.1, "itl_slo_quantile": 0.999}, "off", "off"),
        ({}, 0.2, 0.2),
    ],
)
@pytest.mark.parametrize("before", ["auto", "off", 0.3])
def test_null_takes_a_promise_away_and_turns_nothing_on(
    started: dict[str, Any], asked: float | str | None, expected: float | str, before: float | str
) -> None:
    config = SchedulerConfig(**started)
    config = SettingsPatch(itl_slo_s=before).apply(config, config)  # type: ignore[arg-type]
    changed = SettingsPatch(itl_slo_s=asked).apply(config, SchedulerConfig(**started))  # type: ignore[arg-type]
    promised = expected if isinstance(expected, float) else None
    assert (changed.itl_slo_s, changed.bounds_gaps) == (promised, expected == "auto")


def test_an_answer_can_be_sent_back(http: httpx.Client) -> None:
    for word in ("off", "auto"):
        told = http.patch("/settings", json={"itl_slo_s": word}).json()
        assert (told["asked"]["itl_slo_s"], told["resolved"]["itl_slo_s"]) == (word, None)
        assert http.patch("/settings", json=told["asked"]).json() == told


def test_metrics_go_by_the_new_promises(server: ServerProcess) -> None:
    def late_tokens() -> float:
        return server.metric("slo_checks_total", slo="itl", verdict="late")

    before = late_tokens()
    server.http.patch("/settings", json={"itl_slo_s": 1e-6}).raise_for_status()
    server.http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 6, "ignore_eos": True})
    assert late_tokens() == before + 5
    server.http.patch("/settings", json={"itl_slo_s": None}).raise_for_status()
    server.http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 6, "ignore_eos": True})
    assert late_tokens() == before + 5


def test_the_next_steps_keep_to_it_and_streams_go_on(server: ServerProcess) -> None:
    stream = BackgroundStream(server, max_tokens=120, return_token_ids=True)
    with watching(server) as updates:
        for budget in (16, 150):
            server.http.patch("/settings", json={"max_num_batched_tokens": budget})
            # A step may have been under way.
            kept = next(s for s in steps(updates) if s["budget_tokens"] == budget)
            server.http.post("/v1/completions", json={"prompt": [5] * 200, "max_tokens": 1})
            held = [next(steps(updates)) for _ in range(3)]
            assert {step["budget_tokens"] for step in (kept, *held)} == {budget}
            most = max(sum(chunk["num_tokens"] for chunk in step["chunks"]) for step in held)
            assert most <= budget
    stream.join()
    assert stream.is_complete
    told = [choice for chunk in stream.chunks for choice in chunk["choices"]]
    assert sum(len(choice["token_ids"] or ()) for choice in told) == 120


def test_whole_prompts_and_an_slo_in_turn(server: ServerProcess) -> None:
    def longest_chunk(cache_salt: str) -> int:
        request = {"prompt": [5] * 400, "max_tokens": 1, "cache_salt": cache_salt}
        with watching(server) as updates:
            server.http.post("/v1/completions", json=request).raise_for_status()
            lengths = []
            for step in steps(updates):
                lengths += [chunk["num_tokens"] for chunk in step["chunks"]]
                if sum(lengths) == 400:
                    return max(lengths)
        raise AssertionError

    server.http.patch("/settings", json={"enable_chunked_prefill": False})
    assert longest_chunk("a") == 400
    slos = {"enable_chunked_prefill": True, "ttft_slo_s": 100, "itl_slo_s": 5}
    server.http.patch("/settings", json=slos).raise_for_status()
    assert longest_chunk("b") <= 2048
    server.http.patch("/settings", json={"max_num_batched_tokens": 100}).raise_for_status()
    assert longest_chunk("c") <= 100


def test_streams_draft_from_the_next_step_on_or_no_more(server: ServerProcess) -> None:
    def change(speculative: str | int | None) -> None:
        answer = server.http.patch("/settings", json={"speculative": speculative})
        assert answer.json()["asked"]["speculative"] == (speculative or "auto")

    change("off")
    stream = BackgroundStream(server, prompt="tick tock " * 20, max_tokens=100)
    with watching(server) as updates:
        plain = [next(steps(updates)) for _ in range(8)]
        assert {chunk["kind"] for step in plain for chunk in step["chunks"]} <= {
            "prefill",
            "decode",
        }
        change(3)  # the stream has begun without
        longest = next(s for s in steps(updates) if s["chunks"][0]["kind"] == "verify")
        assert longest["chunks"][0]["num_tokens"] <= 1 + 3
    change(None)
    stream.join()
    assert stream.is_complete


@given(
    name=st.sampled_from([*SECONDS, "max_num_batched_tokens"]),
    value=st.floats(allow_nan=False)
    | st.integers()
    | st.sampled_from([1e-6, 86_400.0, 2**31, 2**31 + 1]),
)
@examples(200)
def test_a_patch_has_the_ranges_of_flags_and_keywords(name: str, value: float) -> None:
    if name == "max_num_batched_tokens":
        value = int(value) if math.isfinite(value) else 0
    results = []
    for kind in (SettingsPatch, SchedulerConfig):
        try:
            results.append(bool(kind(**{name: value})))
        except (ConfigError, ValidationError):
            results.append(False)
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens: "),
        ({"max_num_batched_tokens": MOST + 1}, f"{MOST} at most"),
        ({"max_num_batched_tokens": "16"}, "max_num_batched_tokens: "),
        ({"max_num_batched_tokens": 2**31 + 1}, "max_num_batched_tokens: "),
        ({"itl_slo_s": -1}, "itl_slo_s: "),
        ({"itl_slo_s": "on"}, "itl_slo_s: "),
        ({"itl_slo_s": 5e-324}, "itl_slo_s: "),
        ({"max_wait_s": 0}, "max_wait_s: "),
        ({"prefill_order": "last"}, "prefill_order: "),
        ({"ttft_slo_s": 86_401}, "ttft_slo_s: "),
        ({"itl_slo_s": 1, "itl_slo_quantile": 0.99999}, "itl_slo_quantile: "),
        ({"itl_slo_s": 1e999}, "JSON"),
        ({"policy": "best"}, "policy: "),
        ({"speculative": 0}, "speculative: "),
        ({"speculative": 65}, "speculative"),
        ({"speculative": "on"}, "speculative"),
        ({"max_num_seqs": 4}, "max_num_seqs is not supported"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 16}, "at least"),
        ({"enable_chunked_prefill": False, "itl_slo_s": 1}, "without chunked prefill"),
        ({"itl_slo_s": 1, "policy": "prefill-first"}, "prefill-first"),
        ([], "must be a JSON object"),
    ],
)
def test_what_cannot_be_changes_nothing(http: httpx.Client, change: Any, told: str) -> None:
    content = str(change).replace("'", '"').replace("False", "false").replace("inf", "1e999")
    headers = {"Content-Type": "application/json"}
    response = http.patch("/settings", content=content, headers=headers)
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert http.get("/settings").json()["asked"] == AUTO
