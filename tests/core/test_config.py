from typing import Any

import pytest

from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.slo import BATCH, INTERACTIVE, SloClass


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"itl_slo_s": 0.0}, "itl_s"),
        ({"slo_classes": {INTERACTIVE: SloClass()}}, INTERACTIVE),
        ({"itl_slo_s": 0.1, "enable_chunked_prefill": False}, "chunked prefill"),
        ({"tpot_slo_s": 0.1, "enable_chunked_prefill": False}, "chunked prefill"),
        ({"itl_slo_s": 0.1, "policy": "prefill-first"}, "prefill-first"),
        (
            {"slo_classes": {"fast": SloClass(itl_s=0.1)}, "policy": "prefill-first"},
            "prefill-first",
        ),
        ({"shed_load": True}, "shed_load"),
        ({"shed_load": True, "itl_slo_s": 0.1}, "shed_load"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        SchedulerConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"ttft_slo_s": 1.0, "enable_chunked_prefill": False},
        {"ttft_slo_s": 1.0, "policy": "prefill-first"},
        {"ttft_slo_s": 1.0, "shed_load": True},
        {"slo_classes": {"fast": SloClass(ttft_s=1.0)}, "shed_load": True},
        {"slo_classes": {BATCH: SloClass(ttft_s=60.0)}},
    ],
)
def test_settings_that_go_together_are_taken(settings: dict[str, Any]) -> None:
    SchedulerConfig(**settings)


def test_the_classes_are_the_two_that_are_always_there_and_the_operators() -> None:
    fast = SloClass(itl_s=0.02)
    config = SchedulerConfig(itl_slo_s=0.1, ttft_slo_s=2.0, slo_classes={"fast": fast})
    assert config.classes == {
        INTERACTIVE: SloClass(itl_s=0.1, ttft_s=2.0),
        BATCH: SloClass(),
        "fast": fast,
    }


@pytest.mark.parametrize(
    ("settings", "budget", "order"),
    [
        ({}, 512, "fcfs"),
        ({"itl_slo_s": 0.1}, 2048, "fcfs"),
        ({"tpot_slo_s": 0.1}, 2048, "fcfs"),
        ({"slo_classes": {"fast": SloClass(itl_s=0.1)}}, 2048, "fcfs"),
        ({"ttft_slo_s": 1.0}, 512, "edf"),
        ({"slo_classes": {"fast": SloClass(ttft_s=1.0)}}, 512, "edf"),
        ({"ttft_slo_s": 1.0, "prefill_order": "srf"}, 512, "srf"),
        ({"itl_slo_s": 0.1, "max_num_batched_tokens": 7}, 7, "fcfs"),
        ({"enable_chunked_prefill": False, "max_num_seqs": 4}, 104, "fcfs"),
    ],
)
def test_auto_is_resolved_once(settings: dict[str, Any], budget: int, order: str) -> None:
    config = SchedulerConfig(**settings).resolve(max_model_len=100)
    assert config.max_num_batched_tokens == budget
    assert config.prefill_order == order
    assert config.resolve(max_model_len=100) == config
