"""Checks settings for a running engine."""

from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.engine.process.messages import EngineInfo


def resolved_anew(
    scheduler: SchedulerConfig, info: EngineInfo, started: SchedulerConfig
) -> SchedulerConfig:
    """Resolve and check new settings for a running engine.

    Args:
        started: the resolved settings that it was started with.

    Raises:
        ConfigError: the settings contradict each other, or want larger steps than it may run.
    """
    resolved = scheduler.resolve(info.max_model_len, info.device)
    assert resolved.max_num_batched_tokens is not None
    most_batched_tokens = started.most_batched_tokens(info.max_model_len, info.device)
    if resolved.max_num_batched_tokens > most_batched_tokens:
        raise ConfigError(
            f"max_num_batched_tokens may be {most_batched_tokens} at most on a running server, got "
            f"{resolved.max_num_batched_tokens}"
        )
    if info.device != "cpu" and resolved.most_samples > started.most_samples:
        raise ConfigError(
            "speculative must be off on a server that was started with it off: a GPU's memory for "
            "drafts is taken at the start"
        )
    return resolved
