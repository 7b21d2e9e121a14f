"""What crosses the boundary between the front end and the engine process."""

import msgspec

from legato.core.config import SchedulerConfig
from legato.core.outputs import RequestOutput
from legato.core.slo import SloClass
from legato.core.step_record import EndedBy, EngineRecord


class SetRecording(msgspec.Struct, frozen=True, tag=True):
    """To the engine: begin or stop to make records of what it does."""

    is_on: bool


class Reconfigure(msgspec.Struct, frozen=True, tag=True):
    """To the engine: plan by other settings, which are resolved, from the next step on."""

    scheduler: SchedulerConfig


Control = SetRecording | Reconfigure


class CacheInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache, as it was made."""

    num_blocks: int
    block_size: int
    enable_prefix_caching: bool


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front end needs to know of the model that runs.

    Attributes:
        model: as asked for in the configuration.
        max_model_len: longest prompt plus output, in tokens.
        cache: size of the KV cache.
        slo_classes: what a request may ask to be served as; key the class's name.
        settings: what "auto" was resolved to; key a flag's name, value as printed.
    """

    model: str
    served_model_name: str
    max_model_len: int
    vocab_size: int
    cache: CacheInfo
    slo_classes: dict[str, SloClass]
    settings: dict[str, str]

    def renamed(self, served_model_name: str | None) -> "EngineInfo":
        """The same, under the name that the API gives the model."""
        name = served_model_name or self.served_model_name
        return msgspec.structs.replace(self, served_model_name=name)


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """One step in numbers.

    Attributes:
        prefill_ended_by: of each prefill chunk, as in `ScheduledChunk`.
        seconds: from its planning to its result.
        predicted_s: what was expected of that; None where nothing was, or the step failed.
    """

    num_prefill_tokens: int
    num_decode_tokens: int
    prefill_ended_by: tuple[EndedBy, ...]
    seconds: float
    predicted_s: float | None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot after a step.

    Attributes:
        num_preemptions: from the start, as are the numbers of steps.
        num_failed_steps: that raised at their first attempt.
        step_time_margin: relative error that the step-time model allows for.
        broken_promise: why the latest step could not keep an SLO; empty if it could.
        num_prefix_cache_queries: prompt tokens, of requests that had their first token.
        num_prefix_cache_hits: of these, those whose keys and values were cached.
        kv_usage: fraction of the cache's blocks in use, in [0, 1].
        num_cached_blocks: that are kept for later requests, of those not in use.
        step: the latest; None where none ran since the snapshot before.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    num_steps_over_budget: int = 0
    num_failed_steps: int = 0
    step_time_margin: float = 0.0
    broken_promise: str = ""
    num_prefix_cache_queries: int = 0
    num_prefix_cache_hits: int = 0
    kv_usage: float = 0.0
    num_cached_blocks: int = 0
    step: StepStats | None = None


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded."""

    info: EngineInfo


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start, or cannot go on.

    Attributes:
        is_user_error: whether settings or checkpoint are to blame.
    """

    error: str
    is_user_error: bool


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """What one step brought.

    Attributes:
        records: of the step and of the requests that came and ended; none unless they are asked
            for.
    """

    outputs: list[RequestOutput]
    stats: EngineStats
    records: list[EngineRecord] = []


FromEngine = EngineReady | EngineFailed | StepOutputs
