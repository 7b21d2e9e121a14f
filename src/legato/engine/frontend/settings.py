"""Which settings a running engine may be given."""

from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.engine.process.messages import EngineInfo


def resolved_anew(
    scheduler: SchedulerConfig, info: EngineInfo, most_batched_tokens: int
) -> SchedulerConfig:
    """What an engine is to plan by, with every "auto" replaced.

    Args:
        most_batched_tokens: the largest token budget that it was made for.

    Raises:
        ConfigError: the settings contradict each other, or want longer steps than it may run.
    """
    resolved = scheduler.resolve(info.max_model_len, info.device)
    assert resolved.max_num_batched_tokens is not None
    if resolved.max_num_batched_tokens > most_batched_tokens:
        raise ConfigError(
            f"max_num_batched_tokens may be {most_batched_tokens} at most on a running server, got "
            f"{resolved.max_num_batched_tokens}"
        )
    return resolved
