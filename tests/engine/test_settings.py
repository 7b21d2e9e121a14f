"""Which settings a running engine takes, on a CPU and on a GPU."""

import msgspec
import pytest

from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.engine.client.settings import RunningSettings
from tests.engine.fake_engine import INFO

OFF, ON = SchedulerConfig(speculative="off"), SchedulerConfig(speculative="auto")


@pytest.mark.parametrize(("device", "is_taken"), [("cpu", True), ("cuda", False)])
def test_drafts_need_memory_that_a_gpu_takes_at_the_start(device: str, is_taken: bool) -> None:
    info = msgspec.structs.replace(INFO, device=device)
    off, on = (config.resolve(info.max_model_len, device) for config in (OFF, ON))
    was_off = RunningSettings(OFF, msgspec.structs.replace(info, scheduler=off))
    was_on = RunningSettings(ON, msgspec.structs.replace(info, scheduler=on))
    assert was_on.resolve(OFF) == off
    assert was_on.resolve(ON) == on
    fixed = SchedulerConfig(speculative=8)
    assert was_on.resolve(fixed).speculative == 8
    if is_taken:
        assert was_off.resolve(ON) == on
        return
    for config in (ON, fixed):
        with pytest.raises(ConfigError, match="speculative must be off"):
            was_off.resolve(config)


def test_the_blocks_of_windows_limit_the_tokens_of_a_step() -> None:
    started = SchedulerConfig(max_num_batched_tokens=64).resolve(INFO.max_model_len)
    cache = msgspec.structs.replace(INFO.cache, windows=(512,))
    info = msgspec.structs.replace(INFO, scheduler=started, cache=cache)
    with pytest.raises(ConfigError, match="may be 64 at most"):
        RunningSettings(started, info).resolve(SchedulerConfig(max_num_batched_tokens=65))


def test_a_promise_takes_steps_as_large_as_the_engine_runs() -> None:
    """The default budget of a promise is larger than a server without one may have started with."""
    started = SchedulerConfig().resolve(512)
    info = msgspec.structs.replace(INFO, scheduler=started, max_model_len=512)
    settings = RunningSettings(SchedulerConfig(), info)
    promising = SchedulerConfig(itl_slo_s=0.1)
    wanted = promising.resolve(512).max_num_batched_tokens
    assert wanted is not None
    assert wanted > settings.most_batched_tokens
    assert settings.resolve(promising).max_num_batched_tokens == settings.most_batched_tokens
    assert settings.resolve(SchedulerConfig(itl_slo_s=0.1, max_num_batched_tokens=32)) == (
        SchedulerConfig(itl_slo_s=0.1, max_num_batched_tokens=32).resolve(512)
    )
    whole = SchedulerConfig(enable_chunked_prefill=False)
    assert settings.resolve(whole).max_num_batched_tokens == settings.most_batched_tokens


def test_a_change_reaches_all_watchers_in_their_order() -> None:
    settings = RunningSettings(SchedulerConfig(), INFO)
    seen: list[tuple[int, SchedulerConfig, SchedulerConfig]] = []
    settings.watch(lambda now: seen.append((1, now.asked, now.resolved)))
    settings.watch(lambda now: seen.append((2, now.asked, now.resolved)))
    asked = SchedulerConfig(itl_slo_s=0.1, max_num_batched_tokens=32)
    resolved = settings.resolve(asked)
    assert settings.asked == SchedulerConfig(), "nothing has changed yet"
    settings.change(asked, resolved)
    assert seen == [(1, asked, resolved), (2, asked, resolved)]
