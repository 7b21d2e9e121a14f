import math
from typing import Any

import pytest

from legato.core.cache_config import CacheConfig
from legato.core.config import (
    CalibrationConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    engine_fields,
)
from legato.core.config_fields import Config
from legato.core.errors import ConfigError
from legato.core.slo import BATCH, INTERACTIVE, SloClass


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"max_wait_s": 0.0}, "max_wait_s"),
        ({"prefill_order": None}, "prefill_order"),
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
    ("config", "settings", "complaint"),
    [
        (ModelConfig, {"dtype": "bf16"}, "dtype is one of auto, bfloat16.*got 'bf16'"),
        (ModelConfig, {"model": None}, "model: expected `str`, got `null`"),
        (ModelConfig, {"chat_template": "{{ '\udcff' }}"}, "chat_template has bytes"),
        (ModelConfig, {"max_model_len": 0}, "max_model_len: expected `int` >= 1, got 0"),
        (CacheConfig, {"block_size": "8"}, "block_size: expected `int | null`, got `str`"),
        (CacheConfig, {"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        (CacheConfig, {"gpu_memory_utilization": 1.1}, "gpu_memory_utilization"),
        (CacheConfig, {"kv_cache_memory_bytes": 1, "gpu_memory_utilization": 0.5}, "exclude"),
        (CacheConfig, {"swap_space_bytes": -1}, "swap_space_bytes"),
        (CacheConfig, {"swap_space_bytes": 1, "enable_prefix_caching": False}, "swap space"),
        (SchedulerConfig, {"admission_optimism": 1.1}, "admission_optimism"),
        (SchedulerConfig, {"itl_slo_s": math.nan}, "itl_slo_s"),
        (SchedulerConfig, {"ttft_slo_s": math.inf}, "ttft_slo_s"),
        (SchedulerConfig, {"slo_classes": {"": SloClass()}}, "slo_classes"),
        (CalibrationConfig, {"calibrate": 1}, "calibrate: expected `bool`, got `int`"),
    ],
)
def test_values_out_of_range_are_refused(
    config: type[Config], settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        config(**settings)


def test_no_two_settings_have_the_same_name() -> None:
    names = [field.name for field in engine_fields()]
    assert len(names) == len(set(names))


def test_a_setting_goes_to_the_part_that_has_it() -> None:
    assert EngineConfig.of(block_size=8, calibrate=False) == EngineConfig(
        cache=CacheConfig(block_size=8), calibration=CalibrationConfig(calibrate=False)
    )


def test_a_field_without_a_description_is_refused() -> None:
    class Unsaid(Config, frozen=True, kw_only=True):
        number: int = 1

    with pytest.raises(TypeError, match=r"Unsaid\.number"):
        Unsaid()


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
    ("settings", "budget"),
    [
        ({}, 512),
        ({"itl_slo_s": 0.1}, 2048),
        ({"tpot_slo_s": 0.1}, 2048),
        ({"slo_classes": {"fast": SloClass(itl_s=0.1)}}, 2048),
        ({"ttft_slo_s": 1.0}, 512),
        ({"itl_slo_s": 0.1, "max_num_batched_tokens": 7}, 7),
        ({"enable_chunked_prefill": False, "max_num_seqs": 4}, 104),
    ],
)
def test_auto_is_resolved_once(settings: dict[str, Any], budget: int) -> None:
    config = SchedulerConfig(**settings).resolve(max_model_len=100)
    assert config.max_num_batched_tokens == budget
    assert config.resolve(max_model_len=100) == config


@pytest.mark.parametrize("itl_slo_s", [None, 0.025])
def test_a_gpu_has_defaults_of_its_own(itl_slo_s: float | None) -> None:
    config = SchedulerConfig(itl_slo_s=itl_slo_s).resolve(1000, "cuda")
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (8192, 256)
    assert config.num_steps_in_flight == 2
    assert SchedulerConfig(num_steps_in_flight=1).resolve(1000, "cuda").num_steps_in_flight == 1
    whole = SchedulerConfig(enable_chunked_prefill=False).resolve(1000, "cuda")
    assert whole.max_num_batched_tokens == 1256


def test_a_gpu_has_no_memory_for_longer_steps_than_it_was_started_with() -> None:
    for device, most in (("cpu", 1004), ("cuda", 500)):
        config = SchedulerConfig(max_num_batched_tokens=500, max_num_seqs=4).resolve(1000, device)
        assert config.most_batched_tokens(1000, device) == most


def test_a_cpu_has_one_step_in_flight() -> None:
    assert SchedulerConfig().resolve(1000).num_steps_in_flight == 1
    with pytest.raises(ConfigError, match="num_steps_in_flight"):
        SchedulerConfig(num_steps_in_flight=3)
