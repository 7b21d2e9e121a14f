"""What clients see of their tokens, where several come at once."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from legato.core.outputs import FinishReason, RequestOutput
from legato.core.slo import SloClass
from legato.core.stats import CacheInfo, EngineStats
from legato.observe.metrics.request_recorder import JobRecorder
from legato.observe.metrics.server_metrics import ServerMetrics

CACHE = CacheInfo(num_blocks=8, block_size=4, dtype="bfloat16", enable_prefix_caching=True)
PROMISED = {"gold": SloClass(itl_s=0.1, tpot_s=0.03)}


def counted(deliveries: list[tuple[float, int]]) -> dict[str, float]:
    """After a request of the class that was brought (when, how many tokens) and ended then.

    Key the name of a sample, behind it the verdict where it has one; zeros are left out.
    """
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
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(b"".join(metrics.render()[0]).decode()):
        for sample in family.samples:
            if sample.name.endswith(("_count", "_sum", "_total")):
                kind, verdict = sample.labels.get("slo", ""), sample.labels.get("verdict", "")
                name = f"{sample.name.removeprefix('legato:')} {kind} {verdict}".strip()
                sums[name] = sums.get(name, 0.0) + sample.value
    return {name: total for name, total in sums.items() if total}


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
