"""Which settings a running engine takes, on a CPU and on a GPU."""

import msgspec
import pytest

from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.engine.frontend.settings import resolved_anew
from tests.engine.fake_engine import INFO

OFF, ON = SchedulerConfig(speculative="off"), SchedulerConfig(speculative="auto")


@pytest.mark.parametrize(("device", "is_taken"), [("cpu", True), ("cuda", False)])
def test_drafts_need_memory_that_a_gpu_takes_at_the_start(device: str, is_taken: bool) -> None:
    info = msgspec.structs.replace(INFO, device=device)
    off, on = (config.resolve(info.max_model_len, device) for config in (OFF, ON))
    assert resolved_anew(OFF, info, on) == off
    assert resolved_anew(ON, info, on) == on
    fixed = SchedulerConfig(speculative=8)
    assert resolved_anew(fixed, info, on).speculative == 8
    if is_taken:
        assert resolved_anew(ON, info, off) == on
        return
    for config in (ON, fixed):
        with pytest.raises(ConfigError, match="speculative must be off"):
            resolved_anew(config, info, off)
