"""Flags that are printed make the configuration that they are of."""

import argparse

from hypothesis import given
from hypothesis import strategies as st

from legato.cli.flags import add_engine_flags, engine_config
from legato.core.config import (
    CacheConfig,
    CalibrationConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from legato.core.slo import SloClass
from legato.tune.serve_flags import command_line, serve_flags

_slo_s = st.none() | st.integers(1, 100_000).map(lambda tenths_ms: tenths_ms / 10_000)
_count = st.integers(1, 10_000)
_configs = st.builds(
    EngineConfig,
    model=st.builds(
        ModelConfig,
        model=st.sampled_from(["smollm2-135m-instruct", "a folder/of 'mine'"]),
        max_model_len=st.none() | _count,
        quantization=st.sampled_from([None, "int8"]),
        kernels=st.sampled_from(["auto", "torch"]),
    ),
    cache=st.builds(
        CacheConfig,
        block_size=_count,
        kv_cache_memory_bytes=st.none() | st.integers(1, 2**40),
        enable_prefix_caching=st.booleans(),
    ),
    scheduler=st.builds(
        SchedulerConfig,
        max_num_batched_tokens=st.none() | _count,
        max_num_seqs=_count,
        prefill_order=st.sampled_from([None, "fcfs", "srf", "edf", "lpm"]),
        itl_slo_s=_slo_s,
        tpot_slo_s=_slo_s,
        ttft_slo_s=st.just(2.5),
        slo_classes=st.dictionaries(
            st.sampled_from(["gold", "slow"]), st.builds(SloClass, itl_s=_slo_s, ttft_s=_slo_s)
        ),
        shed_load=st.booleans(),
    ),
    calibration=st.builds(
        CalibrationConfig, calibrate=st.booleans(), calibration_dir=st.sampled_from([None, "x"])
    ),
)


@given(_configs)
def test_flags_make_the_configuration_again(config: EngineConfig) -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    assert engine_config(parser.parse_args(serve_flags(config))) == config


def test_what_is_by_default_is_not_said() -> None:
    assert serve_flags(EngineConfig()) == []
    assert command_line(["--model", "a b"]) == "legato serve --model 'a b'"
