"""A fleet as its operators see it, by HTTP."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from legato.core.step_record import StepRecord
from legato.observe.traces.attribution import Attribution
from legato.observe.traces.request_story import read_story
from legato.observe.traces.trace_file import read_trace
from tests.api.launch import ServerProcess
from tests.api.watch import watching
from tests.fleet.in_process import write_profile
from tests.fleet.server import REPLICAS, launched


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("fleet")
    server = launched(folder, write_profile(folder), "--itl-slo", "500ms")
    try:
        yield server
    finally:
        server.stop()


def complete(fleet: ServerProcess, prompt: str, **headers: str) -> str:
    """The answer's id."""
    body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "stream": True}
    answer = fleet.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    return answer.headers["x-request-id"]


def test_a_live_trace_explains_a_request_by_its_replica(
    fleet: ServerProcess, tmp_path: Path
) -> None:
    fleet.http.post("/trace/start", json={}).raise_for_status()
    with ThreadPoolExecutor(4) as threads:
        ids = list(threads.map(lambda i: complete(fleet, f"{i} " * 100), range(8)))
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(fleet.http.post("/trace/stop").content)
    _, lines = read_trace(trace)
    assert {line.replica_id for line in lines if isinstance(line, StepRecord)} == set(REPLICAS)
    for request_id in ids:
        story = read_story(trace, request_id)
        [replica_id] = story.replica_ids
        assert {step.record.replica_id for step in story.steps} == {replica_id}
        attribution = Attribution(story)
        first = attribution.first_token()
        assert first is not None
        assert first.parts["own_prefill"] > 0
        assert {"http_in", "http_out"} <= first.parts.keys()
        assert len(attribution.told_s) == 8


def test_a_trace_in_perfetto_has_a_group_of_steps_for_each_replica(fleet: ServerProcess) -> None:
    fleet.http.post("/trace/start", json={"format": "perfetto"}).raise_for_status()
    complete(fleet, "One")
    complete(fleet, "Other")
    events = json.loads(fleet.http.post("/trace/stop").content)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    groups = {names[e["pid"]] for e in events if e["name"].startswith("step ")}
    assert groups == {f"replica {replica_id}" for replica_id in REPLICAS}


def test_metrics_tell_of_all_replicas_and_of_each(fleet: ServerProcess) -> None:
    before = fleet.metric("step_time_seconds_count")
    complete(fleet, "One")
    assert fleet.metric("step_time_seconds_count") > before
    families = text_string_to_metric_families(fleet.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    for name in ("requests_running", "kv_cache_usage_perc", "forecast_ttft_seconds"):
        own = [one for one in samples if one.name == f"legato:replica_{name}"]
        assert {one.labels["replica"] for one in own} == set(REPLICAS)
    started = [one.value for one in samples if one.name == "legato:replica_start_time_seconds"]
    assert min(started) > 1.6e9, "no Unix time"


def test_settings_hold_for_all(fleet: ServerProcess) -> None:
    changed = {"ttft_slo_s": 7.0, "max_num_batched_tokens": 32}
    answer = fleet.http.patch("/settings", json=changed)
    assert answer.status_code == 200, answer.text
    try:
        assert fleet.http.get("/settings").json()["asked"]["ttft_slo_s"] == 7.0
        with watching(fleet) as updates:
            seen: dict[str, int] = {}
            update = next(updates)
            assert update["replicas"] == list(REPLICAS)
            for i in range(4):
                complete(fleet, f"{i} and {i} " * 60)
            while seen.keys() != set(REPLICAS):
                for step in (r for r in next(updates)["records"] if r["kind"] == "step"):
                    tokens = [c["num_tokens"] for c in step["chunks"] if c["kind"] == "prefill"]
                    most = max(seen.get(step["replica_id"], 0), sum(tokens))
                    seen |= {step["replica_id"]: most} if most else {}
        assert set(seen.values()) == {32}
    finally:
        fleet.http.patch("/settings", json=dict.fromkeys(changed)).raise_for_status()


def num_cached(fleet: ServerProcess, prompt: str) -> list[int]:
    """Prompt tokens that each replica finds in its cache; requests take turns."""
    body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True}
    usages = [fleet.http.post("/v1/completions", json=body).json()["usage"] for _ in REPLICAS]
    return [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]


def test_the_caches_of_all_replicas_are_reset(fleet: ServerProcess) -> None:
    prompt = "harps and cellos " * 50
    assert num_cached(fleet, prompt) == [0, 0]
    assert min(num_cached(fleet, prompt)) > 100
    answer = fleet.http.post("/reset_prefix_cache")
    assert answer.json() == {"success": True}
    assert num_cached(fleet, prompt) == [0, 0]
    assert min(num_cached(fleet, prompt)) > 100, "they are filled again"


def test_a_fleet_has_admins(tmp_path: Path) -> None:
    keys = ("--api-key", "ops=sk-ops", "--admin-api-key", "sk-root")
    fleet = launched(tmp_path, write_profile(tmp_path), *keys)
    try:
        for key, status in (("none", 401), ("sk-ops", 403), ("sk-root", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            for method, path in (
                ("PATCH", "/settings"),
                ("POST", "/trace/start"),
                ("POST", "/reset_prefix_cache"),
            ):
                answer = fleet.http.request(method, path, json={}, headers=headers)
                assert answer.status_code == status
    finally:
        fleet.stop()
