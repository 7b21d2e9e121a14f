"""An engine process whose model computes nothing: a step lasts as long as it is told to.

    python -m benchmarks.token_cost.engine STEP_S FD

All else is the engine's own. What it takes of a processor is what a token costs outside the model.
"""

import sys
from functools import partial

from legato.core.cache_config import BLOCK_SIZES
from legato.core.config import EngineConfig
from legato.core.stats import CacheInfo
from legato.engine.loop.engine_loop import EngineLoop
from legato.engine.main import main
from legato.engine.process.engine_messages import EngineInfo
from legato.executor.simulated import RealTimeClock
from legato_lab.simulation.profiled_server import calibrate
from legato_lab.simulation.profiles import PROFILES
from legato_lab.simulation.simulated_run import simulated_engine

_PROFILE = PROFILES["llama-3-8b-h100"]
_VOCAB_SIZE = 2**16
"""Above the tokens of any prompt; sampled ones are below the executor's own bound."""


def build(step_s: float, config: EngineConfig) -> tuple[EngineLoop, EngineInfo]:
    """What `build_engine` is for a model."""
    num_tokens, max_model_len = _PROFILE.kv_cache_tokens, _PROFILE.max_model_len
    scheduler = config.scheduler.resolve(max_model_len)
    assert scheduler.max_num_seqs is not None
    engine, _ = simulated_engine(
        RealTimeClock(),
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
        acceptance=None,
        is_sharing=False,
    )
    block_size = BLOCK_SIZES["cpu"]
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
    sys.exit(main(int(sys.argv[2]), partial(build, float(sys.argv[1]))))
