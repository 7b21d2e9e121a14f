"""The scheduler's settings of a running engine."""

from collections.abc import Callable

import msgspec

from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.engine.process.engine_messages import EngineInfo
from legato.observe.traces.trace_file import ReplayBasis


class RunningSettings:
    """The settings in effect, and the parts that are called when they change.

    Args:
        asked: the settings that the engine was started with, before "auto" was resolved.
        info: of the engine as it was started.

    Attributes:
        started: the settings that the engine was started with, before "auto" was resolved.
        asked: the settings in effect, before "auto" is resolved.
        resolved: the same, with every "auto" replaced.
        most_batched_tokens: the largest token budget that a change may set.
    """

    def __init__(self, asked: SchedulerConfig, info: EngineInfo) -> None:
        self.started = self.asked = asked
        self.resolved = asked.resolve(info.max_model_len, info.device)
        self.most_batched_tokens = info.scheduler.most_batched_tokens(
            info.max_model_len, info.device, has_windows=bool(info.cache.windows)
        )
        self._info = info
        self._watchers: list[Callable[[RunningSettings], object]] = []

    @property
    def replay_basis(self) -> ReplayBasis:
        """What a replay of a trace that begins now needs."""
        info = self._info
        return ReplayBasis(
            scheduler=self.resolved,
            max_model_len=info.max_model_len,
            num_blocks=info.cache.num_blocks,
            block_size=info.cache.block_size,
        )

    def watch(self, watcher: Callable[["RunningSettings"], object]) -> None:
        """Call `watcher` after each change; watchers are called in the order in which they came."""
        self._watchers.append(watcher)

    def resolve(self, asked: SchedulerConfig) -> SchedulerConfig:
        """Resolve and check other settings. The default budget is the engine's largest, if less.

        Raises:
            ConfigError: the settings contradict each other, or want larger steps than the engine
                may run.
        """
        info = self._info
        resolved = asked.resolve(info.max_model_len, info.device)
        budget, most = resolved.max_num_batched_tokens, self.most_batched_tokens
        assert budget is not None
        if budget > most and asked.max_num_batched_tokens is None and asked.enable_chunked_prefill:
            resolved = msgspec.structs.replace(resolved, max_num_batched_tokens=most)
        elif budget > most:
            raise ConfigError(
                f"max_num_batched_tokens may be {most} at most on a running server, got {budget}"
            )
        if info.device != "cpu" and resolved.most_samples > info.scheduler.most_samples:
            raise ConfigError(
                "speculative must be off on a server that was started with it off: a GPU's memory "
                "for drafts is taken at the start"
            )
        return resolved

    def change(self, asked: SchedulerConfig, resolved: SchedulerConfig) -> None:
        """Put settings into effect, and call all watchers.

        Args:
            resolved: as returned by `resolve`.
        """
        self.asked, self.resolved = asked, resolved
        for watcher in self._watchers:
            watcher(self)
