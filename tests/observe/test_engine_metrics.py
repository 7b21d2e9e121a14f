"""Metrics of steps are those of their records."""

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from legato.core.stats import CacheInfo, EngineStats, TransferStats
from legato.core.step_record import StepRecord
from legato.observe.metrics.server_metrics import ServerMetrics
from tests.observe.recorded import recorded_run

STEPS = [
    record for record in recorded_run([(0.0, 70, 3)], budget=32) if isinstance(record, StepRecord)
]


def samples_of(steps: list[StepRecord], stats: EngineStats | None = None) -> list[Sample]:
    """All that is shown after these steps."""
    cache = CacheInfo(num_blocks=8, block_size=4, dtype="bfloat16", enable_prefix_caching=True)
    latest = stats or EngineStats()
    metrics = ServerMetrics("m", lambda: latest, lambda: 2, cache=cache, classes={}, kept=dict)
    for step in steps:
        metrics.steps.observe(step)
    families = text_string_to_metric_families(b"".join(metrics.render()[0]).decode())
    return [sample for family in families for sample in family.samples]


def value(samples: list[Sample], name: str, labels: dict[str, str]) -> float:
    """Of the only one with that name, without its prefix, and these labels."""
    [found] = [
        sample.value
        for sample in samples
        if sample.name == f"legato:{name}" and labels.items() <= sample.labels.items()
    ]
    return found


def shown(steps: list[StepRecord], stats: EngineStats | None = None) -> dict[str, float]:
    """Sums over labels; key the name of a sample, without its prefix."""
    sums: dict[str, float] = {}
    for sample in samples_of(steps, stats):
        assert sample.labels["model_name"] == "m"
        name = sample.name.removeprefix("legato:")
        sums[name] = sums.get(name, 0.0) + sample.value
    return sums


def test_every_step_is_counted() -> None:
    sums = shown(STEPS)
    assert len(STEPS) == 5
    assert sums["iteration_prefill_tokens_sum"] == 70
    assert sums["iteration_decode_tokens_sum"] == 2
    assert sums["iteration_tokens_total_sum"] == 72
    assert sums["prefill_chunk_tokens"] == 70 - 2 * 32
    assert sums["prefill_chunks_total"] == 3
    assert sums["step_time_seconds_sum"] == pytest.approx(sum(step.seconds for step in STEPS))


def test_drafts_are_a_streams_tokens() -> None:
    chunk = msgspec.structs.replace(STEPS[-1].chunks[0], kind="verify", num_tokens=4)
    sums = shown([msgspec.structs.replace(STEPS[-1], chunks=(chunk,))])
    assert (sums["iteration_decode_tokens_sum"], sums["iteration_prefill_tokens_sum"]) == (4, 0)


def test_drafts_are_counted_by_drafter_and_place() -> None:
    records = recorded_run([(0.0, 8, 40), (0.02, 40, 30)], speculative=4, vocab_size=2)
    steps = [record for record in records if isinstance(record, StepRecord)]
    chunks = [chunk for step in steps for chunk in step.chunks if chunk.kind == "verify"]
    own = [chunk for chunk in chunks if chunk.num_drafts]
    assert {0, 1, 4} <= {chunk.num_accepted for chunk in own}
    samples = samples_of(steps)
    of_own = {"drafter": "own"}
    assert value(samples, "spec_decode_num_drafts_total", of_own) == len(own)
    drafted, right = sum(c.num_drafts for c in own), sum(c.num_accepted for c in own)
    assert value(samples, "spec_decode_num_draft_tokens_total", of_own) == drafted
    assert value(samples, "spec_decode_num_accepted_tokens_total", of_own) == right
    assert value(samples, "spec_decode_num_draft_tokens_total", {"drafter": "recent"}) == 0
    for place in range(5):
        expected = sum(chunk.num_accepted > place for chunk in own)
        found = value(
            samples, "spec_decode_num_accepted_tokens_per_pos_total", {"position": str(place)}
        )
        assert found == expected
    for reason in ("proposals", "token_budget"):
        ended = sum(step.drafts_ended_by == reason for step in steps)
        assert ended
        assert value(samples, "drafts_ended_total", {"ended_by": reason}) == ended
    streams = sum(chunk.kind != "prefill" for step in steps for chunk in step.chunks)
    assert value(samples, "stream_steps_total", {}) == streams


def test_places_are_bounded() -> None:
    chunk = msgspec.structs.replace(
        STEPS[-1].chunks[0],
        kind="verify", num_tokens=65, num_samples=65, drafter="recent", num_accepted=64,
    )  # fmt: skip
    sums = shown([msgspec.structs.replace(STEPS[-1], chunks=(chunk,))])
    assert sums["spec_decode_num_accepted_tokens_total"] == 64
    assert sums["spec_decode_num_accepted_tokens_per_pos_total"] == 16


def test_only_a_step_that_went_as_planned_says_how_good_predictions_are() -> None:
    step = msgspec.structs.replace(STEPS[0], predicted_s=STEPS[0].seconds / 2)
    unplanned = {"failed": ("0",), "ran_out_of_memory": True, "predicted_s": None}
    others = [msgspec.structs.replace(step, **{name: value}) for name, value in unplanned.items()]
    sums = shown([step, *others])
    assert sums["step_time_ratio_sum"] == 2.0
    assert sums["step_time_ratio_count"] == 1
    assert sums["step_time_seconds_count"] == 4


def test_what_is_read_is_the_latest() -> None:
    stats = EngineStats(
        num_running=3, num_preemptions=5, num_failed_steps=7, num_cached_blocks=2, kv_usage=0.5,
        num_contained_errors=8, window_usage={512: 0.25},
        num_prefix_cache_short=10, num_state_checkpoints=11,
        broken_promise="too slow",
        transfer=TransferStats(num_bytes=9, num_leases=4, num_expired=1, num_recomputed=6),
    )  # fmt: skip
    sums = shown([], stats)
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 0,
        "num_preemptions_total": 5,
        "num_failed_steps_total": 7,
        "num_contained_errors_total": 8,
        "num_engine_restarts_total": 2,
        "kv_cache_usage_perc": 0.5,
        "kv_cache_cached_perc": 2 / 8,
        "kv_window_usage_perc": 0.25,
        "prefix_cache_short_total": 10,
        "state_checkpoints": 11,
        "slo_unattainable": 1,
        "kv_transfer_bytes_total": 9,
        "kv_transfer_leases": 4,
        "kv_transfer_leases_expired_total": 1,
        "kv_transfer_prompts_recomputed_total": 6,
        "cache_config_info": 1,
    }
    assert {name: sums[name] for name in expected} == expected
