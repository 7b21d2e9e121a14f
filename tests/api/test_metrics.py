"""GET /metrics."""

import time
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.launch import MODEL, ServerProcess
from tests.api.wire import connect, post, read_response

LONG_PROMPT = [1000 + i for i in range(1500)]


@pytest.fixture(scope="module", autouse=True)
def _knows_its_steps(watched: ServerProcess) -> None:
    """Serve more steps, of both kinds, than it takes to know how long one lasts."""
    complete(watched, prompt=[6000 + i for i in range(400)], max_tokens=40)


def complete(server: ServerProcess, **fields: Any) -> None:
    request = {"prompt": "Once upon a time", "max_tokens": 5, "ignore_eos": True, **fields}
    server.http.post("/v1/completions", json=request).raise_for_status()


class Growth:
    """How much samples have grown since it was made."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._before = _samples(server)

    def __call__(self, name: str, **labels: str) -> float:
        return _sum(_samples(self._server), name, labels) - _sum(self._before, name, labels)


def _samples(server: ServerProcess) -> list[Any]:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return [sample for family in families for sample in family.samples]


def _sum(samples: list[Any], name: str, labels: dict[str, str]) -> float:
    return sum(
        sample.value
        for sample in samples
        if sample.name == f"legato:{name}" and labels.items() <= sample.labels.items()
    )


def test_the_models_name_is_on_everything(http: httpx.Client) -> None:
    families = text_string_to_metric_families(http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    # Prometheus' own, of any process.
    samples = [sample for sample in samples if not sample.name.startswith("process_")]
    assert {sample.labels["model_name"] for sample in samples} == {MODEL}
    others = [sample for sample in samples if not sample.name.startswith("legato:")]
    assert {sample.name for sample in others} == {
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
    }  # fmt: skip
    for sample in others:
        name = sample.name.replace("vllm", "legato")
        [same] = [one for one in samples if one.name == name]
        assert (sample.labels, sample.value) == (same.labels, same.value)


def test_a_request_is_counted_once_everywhere(watched: ServerProcess) -> None:
    growth = Growth(watched)
    complete(watched, n=2, prompt=[3, 1, 4, 1])
    expected = {
        "prompt_tokens_total": 4,
        "prompt_tokens_cached_total": 0,
        "generation_tokens_total": 2 * 5,
        "time_to_first_token_seconds_count": 1,
        "inter_token_latency_seconds_count": 2 * 4,
        "request_time_per_output_token_seconds_count": 2,
        "e2e_request_latency_seconds_count": 1,
        "request_queue_time_seconds_count": 1,
        "request_prompt_tokens_sum": 4,
        "request_prefill_kv_computed_tokens_sum": 4,
        "request_generation_tokens_sum": 2 * 5,
        "request_max_num_generation_tokens_sum": 5,
        "request_params_n_sum": 2,
        "request_params_max_tokens_sum": 5,
        "request_success_total": 1,
        "request_choices_total": 2,
        "prefix_cache_queries_total": 4,
    }
    assert {name: growth(name) for name in expected} == expected
    assert growth("request_success_total", finished_reason="length") == 1
    assert growth("request_choices_total", finished_reason="length") == 2


def test_the_parts_of_a_requests_time_add_up(watched: ServerProcess) -> None:
    growth = Growth(watched)
    complete(watched, prompt=[5] * 300, max_tokens=20)
    seconds = {
        part: growth(f"request_{part}_time_seconds_sum")
        for part in ("queue", "prefill", "decode", "inference")
    }
    assert all(value > 0.0 for value in seconds.values())
    assert seconds["inference"] == pytest.approx(seconds["prefill"] + seconds["decode"])
    whole_s = seconds["queue"] + seconds["inference"]
    assert growth("e2e_request_latency_seconds_sum") == pytest.approx(whole_s)
    first_s = seconds["queue"] + seconds["prefill"]
    assert growth("time_to_first_token_seconds_sum") == pytest.approx(first_s)
    gaps_s = growth("inter_token_latency_seconds_sum")
    assert gaps_s == pytest.approx(seconds["decode"])


def test_every_step_is_seen(watched: ServerProcess) -> None:
    """Steps that only compute a part of a prompt, too."""
    growth, prompt = Growth(watched), LONG_PROMPT[:600]
    complete(watched, prompt=prompt, max_tokens=4)
    assert growth("iteration_prefill_tokens_sum") == len(prompt)
    assert growth("iteration_decode_tokens_sum") == 3
    assert growth("iteration_tokens_total_sum") == len(prompt) + 3
    num_chunks = growth("prefill_chunks_total")
    assert num_chunks >= 3  # a step holds 256 tokens
    assert growth("prefill_chunks_total", ended_by="prompt_end") == 1
    for name in ("iteration_tokens_total", "step_time_seconds", "step_time_ratio"):
        assert growth(f"{name}_count") == num_chunks + 3
    assert 0 < watched.metric("prefill_chunk_tokens") <= 256


def test_promises_are_judged_by_class(watched: ServerProcess) -> None:
    growth = Growth(watched)
    for slo_class in ("interactive", "hopeless", "batch"):
        complete(watched, slo_class=slo_class)
    kept = {"slo_class": "interactive", "verdict": "in_time"}
    broken = {"slo_class": "hopeless", "verdict": "late"}
    assert growth("slo_checks_total", slo="ttft", **kept) == 1
    assert growth("slo_checks_total", slo="itl", **kept) == 4
    assert growth("slo_checks_total", slo="itl", **broken) == 4
    assert growth("slo_checks_total", slo="tpot", **broken) == 1
    assert growth("slo_checks_total") == 10
    assert growth("slo_requests_total", slo_class="interactive", verdict="attained") == 1
    assert growth("slo_requests_total", slo_class="hopeless", verdict="missed") == 1
    assert growth("slo_requests_total") == 2


def test_what_cannot_be_in_time_is_refused_or_waives_its_promise(watched: ServerProcess) -> None:
    growth = Growth(watched)
    hasty = {"slo_class": "hasty"}
    with pytest.raises(httpx.HTTPStatusError, match="429"):
        complete(watched, prompt=LONG_PROMPT[::-1], **hasty)
    assert growth("request_refused_total", reason="ttft_slo") == 1
    assert growth("slo_requests_total", verdict="refused", **hasty) == 1
    complete(watched, prompt=LONG_PROMPT[::-1], allow_best_effort=True, **hasty)
    assert growth("slo_requests_total", verdict="waived", **hasty) == 1
    assert growth("slo_checks_total") == 0
    assert growth("slo_requests_total") == 2


def test_a_deadline_counts_from_the_first_byte(watched: ServerProcess) -> None:
    """The body comes when the first token is due, which is as late as metrics find it."""
    growth = Growth(watched)
    asked = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 1, "slo_class": "second"}
    head, body = post("/v1/completions", asked).split(b"\r\n\r\n")
    with connect(watched) as sock:
        sock.sendall(head + b"\r\n\r\n")
        time.sleep(1.2)
        sock.sendall(body)
        assert read_response(sock)[0] == 429
    assert growth("request_refused_total", reason="ttft_slo") == 1
    complete(watched, slo_class="second", max_tokens=1)


def test_a_full_queue_is_a_reason(watched: ServerProcess) -> None:
    growth = Growth(watched)
    with pytest.raises(httpx.HTTPStatusError, match="429"):
        complete(watched, n=8)  # which come together: two run, and two wait
    assert growth("request_refused_total", reason="queue_full") == 1
    assert growth("request_success_total", finished_reason="refused") == 1
    assert growth("request_choices_total", finished_reason="refused") == 8
    watched.wait_for_metric("num_requests_running", 0)


def test_errors_are_counted_by_status_and_nonsense_is_no_label(watched: ServerProcess) -> None:
    growth = Growth(watched)
    watched.http.post("/v1/completions", json={})
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        complete(watched, slo_class="platinum")
    assert growth("request_errors_total", status="400") == 2
    assert growth("request_refused_total", reason="invalid") == 1
    assert "platinum" not in watched.http.get("/metrics").text


def test_an_slo_is_a_bound_of_a_bucket(watched: ServerProcess) -> None:
    for name, le in (("inter_token_latency", "61.0"), ("time_to_first_token", "600.0")):
        counted = {"le": le, "slo_class": "interactive"}
        assert watched.metric(f"{name}_seconds_bucket", **counted) > 0
        assert watched.metric("slo_seconds", slo="itl", slo_class="interactive") == 61.0


def test_cached_tokens(watched: ServerProcess) -> None:
    prompt = list(range(1000, 1100))
    complete(watched, prompt=prompt)
    growth = Growth(watched)
    complete(watched, prompt=prompt)
    num_cached = growth("prompt_tokens_cached_total")
    assert 0 < num_cached < 100
    assert growth("prefix_cache_hits_total") == num_cached
    assert growth("request_prefill_kv_computed_tokens_sum") == 100 - num_cached
    assert watched.metric("kv_cache_cached_perc") > 0.0
    assert watched.metric("kv_cache_usage_perc") == 0.0
