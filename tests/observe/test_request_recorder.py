"""What clients see of their tokens, where several come at once."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from legato.core.outputs import FinishReason, RequestOutput
from legato.core.slo import SloClass
from legato.core.stats import CacheInfo, EngineStats
from legato.observe.metrics.request_recorder import JobRecorder
from legato.observe.metrics.server_metrics import ServerMetrics

CACHE = CacheInfo(num_blocks=8, block_size=4, dtype="bfloat16", enable_prefix_caching=True)
PROMISED = {"gold": SloClass(itl_s=0.1, tpot_s=0.03)}


def totals(metrics: ServerMetrics) -> dict[str, float]:
    """Samples that are not zero; key the name, behind it the verdict where it has one."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(b"".join(metrics.render()[0]).decode()):
        for sample in family.samples:
            if sample.name.endswith(("_count", "_sum", "_total")):
                kind, verdict = sample.labels.get("slo", ""), sample.labels.get("verdict", "")
                name = f"{sample.name.removeprefix('legato:')} {kind} {verdict}".strip()
                sums[name] = sums.get(name, 0.0) + sample.value
    return {name: total for name, total in sums.items() if total}


def counted(deliveries: list[tuple[float, int]]) -> dict[str, float]:
    """After a request of the class that was brought (when, how many tokens) and ended then."""
    metrics = ServerMetrics("m", EngineStats, int, cache=CACHE, classes=PROMISED, kept=dict)
    recorder = JobRecorder(
        metrics, prompt_lens=[4], n=1, max_tokens=None, slo_class="gold", arrival_s=0.0
    )
    for place, (received_s, num_tokens) in enumerate(deliveries, start=1):
        output = RequestOutput(
            request_id="0", new_token_ids=tuple(range(num_tokens)), scheduled_s=0.0
        )
        ends = FinishReason.LENGTH if place == len(deliveries) else None
        recorder.take(0, output, num_tokens=num_tokens, finish_reason=ends, received_s=received_s)
    return totals(metrics)


def test_a_gap_is_between_deliveries_and_a_pace_is_of_tokens() -> None:
    found = counted([(1.0, 1), (1.08, 4), (1.16, 4), (1.4, 1)])
    assert found["generation_tokens_total"] == 10
    assert found["inter_token_latency_seconds_count"] == 3
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(0.4)
    assert found["request_time_per_output_token_seconds_sum"] == pytest.approx(0.4 / 9)
    assert found["slo_checks_total itl in_time"] == 2
    assert found["slo_checks_total itl late"] == 1
    assert found["slo_checks_total tpot late"] == 1


def test_tokens_that_come_together_do_not_excuse_a_gap() -> None:
    """Of one gap, one is late, however many tokens came behind it; the pace is kept."""
    found = counted([(1.0, 1), (1.2, 200)])
    assert found["slo_checks_total itl late"] == 1
    assert "slo_checks_total itl in_time" not in found
    assert found["slo_checks_total tpot in_time"] == 1
    assert found["slo_requests_total  missed"] == 1


@given(
    prompt_lens=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    n=st.integers(1, 4),
    order=st.randoms(use_true_random=False),
)
def test_each_prompt_is_a_request_for_any_number_of_choices(
    prompt_lens: list[int], n: int, order: Random
) -> None:
    """Later choices find the first one's blocks in the cache, which is no hit of the request."""
    metrics = ServerMetrics("m", EngineStats, int, cache=CACHE, classes=PROMISED, kept=dict)
    recorder = JobRecorder(
        metrics, prompt_lens=prompt_lens, n=n, max_tokens=2, slo_class="gold", arrival_s=0.0
    )
    choices = list(range(n * len(prompt_lens)))
    last_s: dict[int, float] = {}
    order.shuffle(choices)
    for place, index in enumerate([*choices, *choices], start=1):
        prompt, choice = divmod(index, n)
        is_last = index in last_s
        last_s[index] = float(place)
        output = RequestOutput(
            request_id=str(index),
            new_token_ids=(1,),
            scheduled_s=0.5,
            num_cached_tokens=0 if choice == 0 else prompt_lens[prompt] - 1,
        )
        ends = FinishReason.LENGTH if is_last else None
        recorder.take(index, output, num_tokens=1, finish_reason=ends, received_s=float(place))
    recorder.end(FinishReason.ABORT, 100.0)  # there is nothing left to end
    found, num_requests = totals(metrics), len(prompt_lens)
    assert found["request_success_total"] == num_requests
    assert found["request_choices_total"] == n * num_requests
    assert found["prompt_tokens_total"] == sum(prompt_lens)
    assert found["request_prompt_tokens_sum"] == sum(prompt_lens)
    assert found["request_prefill_kv_computed_tokens_sum"] == sum(prompt_lens)
    assert "prompt_tokens_cached_total" not in found
    assert found["generation_tokens_total"] == 2 * n * num_requests
    assert found["request_generation_tokens_sum"] == 2 * n * num_requests
    for name in ("time_to_first_token", "request_queue_time", "e2e_request_latency"):
        assert found[f"{name}_seconds_count"] == num_requests
    ends_s = [max(last_s[p * n + i] for i in range(n)) for p in range(num_requests)]
    assert found["e2e_request_latency_seconds_sum"] == sum(ends_s)
    assert found["inter_token_latency_seconds_count"] == n * num_requests
