"""An engine process whose model computes nothing: a step lasts as long as it is told to.

    python -m benchmarks.token_cost.engine STEP_S FD

All else is the engine's own. What it takes of a processor is what a token costs outside the model.
"""

import sys
import time

from legato.core.config import EngineConfig
from legato.core.stats import CacheInfo
from legato.engine.assembly.main import main as serve
from legato.engine.loop.engine_loop import EngineLoop
from legato.engine.process.messages import EngineInfo
from legato.executor.simulated import VirtualClock
from legato.simulation.profiled_server import calibrate
from legato.simulation.profiles import PROFILES
from legato.simulation.run import simulated_engine

_PROFILE = PROFILES["llama-3-8b-h100"]
_VOCAB_SIZE = 2**16
"""Any prompt's tokens are below; those that are sampled are below the executor's own bound."""


class _WallClock(VirtualClock):
    """A clock that is slept through."""

    def __init__(self) -> None:
        """Nothing is kept: the machine's clock goes by itself."""

    @property
    def now_s(self) -> float:  # type: ignore[override]
        return time.monotonic()

    def advance_to(self, time_s: float) -> None:
        time.sleep(max(0.0, time_s - self.now_s))


def main(step_s: float, fd: int) -> int:
    def build_engine(config: EngineConfig) -> tuple[EngineLoop, EngineInfo]:
        return _build(config, step_s)

    return serve(fd, build_engine)


def _build(config: EngineConfig, step_s: float) -> tuple[EngineLoop, EngineInfo]:
    num_tokens, max_model_len = _PROFILE.kv_cache_tokens, _PROFILE.max_model_len
    scheduler = config.scheduler.resolve(max_model_len)
    assert scheduler.max_num_seqs is not None
    engine = simulated_engine(
        _WallClock(),
        scheduler,
        rows=_PROFILE.costs.rows,
        belief=calibrate(
            _PROFILE.costs,
            max_model_len=max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            noise=0.0,
            seed=0,
        ),
        step_time_s=lambda _plan: step_s,
        max_model_len=max_model_len,
        kv_cache_tokens=num_tokens,
        is_sharing=False,
    )
    block_size = config.cache.block_size
    info = EngineInfo(
        model=config.model.model,
        served_model_names=("simulated",),
        max_model_len=max_model_len,
        vocab_size=_VOCAB_SIZE,
        cache=CacheInfo(
            num_blocks=num_tokens // block_size,
            block_size=block_size,
            enable_prefix_caching=False,
            dtype="bfloat16",
        ),
        scheduler=scheduler,
        settings={},
    )
    return engine, info


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])))
