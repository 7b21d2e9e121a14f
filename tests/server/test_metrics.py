"""GET /metrics."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.server.launch import MODEL, ServerProcess

NAMES = {
    "legato:num_requests_running",
    "legato:num_requests_waiting",
    "legato:kv_cache_usage_perc",
    "legato:num_preemptions",
    "legato:num_steps_over_budget",
    "legato:num_failed_steps",
    "legato:num_engine_restarts",
    "legato:prefix_cache_queries",
    "legato:prefix_cache_hits",
    "legato:slo_unattainable",
    "legato:step_time_margin",
    "legato:prompt_tokens",
    "legato:generation_tokens",
    "legato:request_success",
    "legato:request_errors",
    "legato:time_to_first_token_seconds",
    "legato:inter_token_latency_seconds",
    "legato:request_time_per_output_token_seconds",
    "legato:e2e_request_latency_seconds",
    "legato:request_prompt_tokens",
    "legato:request_generation_tokens",
}


def test_names_and_label(http: httpx.Client) -> None:
    families = [
        family
        for family in text_string_to_metric_families(http.get("/metrics").text)
        if not family.name.endswith("_created")  # prometheus_client's own
    ]
    assert {family.name for family in families} == NAMES
    assert {s.labels["model_name"] for family in families for s in family.samples} == {MODEL}


def test_a_request_is_counted_once_everywhere(server: ServerProcess) -> None:
    expected = {
        "prompt_tokens_total": 2 * 4,
        "generation_tokens_total": 2 * 5,
        "time_to_first_token_seconds_count": 2,
        "inter_token_latency_seconds_count": 2 * 4,
        "request_time_per_output_token_seconds_count": 2,
        "e2e_request_latency_seconds_count": 2,
        "request_prompt_tokens_sum": 2 * 4,
        "request_generation_tokens_sum": 2 * 5,
        "request_success_total": 2,
    }
    before = {name: server.metric(name) for name in expected}
    request = {"prompt": "Once upon a time", "max_tokens": 5, "ignore_eos": True, "n": 2}
    server.http.post("/v1/completions", json=request)
    assert {name: server.metric(name) - before[name] for name in expected} == expected


def test_times_are_in_order(server: ServerProcess) -> None:
    request = {"prompt": "Once", "max_tokens": 3, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=request) as response:
        response.read()
    ttft = server.metric("time_to_first_token_seconds_sum")
    assert 0 < ttft < server.metric("e2e_request_latency_seconds_sum")


def test_errors_are_counted_by_status(server: ServerProcess) -> None:
    before = server.metric("request_errors_total", status="400")
    server.http.post("/v1/completions", json={})
    assert server.metric("request_errors_total", status="400") == before + 1
