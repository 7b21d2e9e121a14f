"""Settings, one frozen value a subsystem, built once at the edge and validated there."""

from typing import Literal

import msgspec

from legato.core.errors import ConfigError

DType = Literal["auto", "bfloat16", "float16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
Policy = Literal["stall-free", "prefill-first"]

DEFAULT_MODEL = "smollm2-135m-instruct"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model to run, and how.

    Attributes:
        model: a Hugging Face folder or hub id, a path to a GGUF file, or `DEFAULT_MODEL`.
        revision: branch, tag or commit of a hub model.
        dtype: of weights and cache; "auto" takes the checkpoint's, bfloat16 for a GGUF file.
        max_model_len: longest prompt plus output in tokens; None takes the model's own.
        num_threads: of the forward pass on CPU; None takes one a core.
    """

    model: str = DEFAULT_MODEL
    revision: str | None = None
    dtype: DType = "auto"
    device: Device = "auto"
    max_model_len: int | None = None
    num_threads: int | None = None


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size of the paged KV cache.

    Attributes:
        block_size: tokens a block.
        kv_cache_memory_bytes: size of the cache; None takes `memory_utilization` of what is free.
        memory_utilization: fraction of the free memory, in (0, 1]; None takes 0.9 of a GPU's and
            0.25 of the host's, which other programs want too.
    """

    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    memory_utilization: float | None = None

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {self.block_size}")
        if self.memory_utilization is not None and not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(
                f"memory utilization must be in (0, 1], got {self.memory_utilization}"
            )


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may run in one step.

    Attributes:
        max_num_batched_tokens: token budget of a step; None takes 512, or without chunked prefill
            the smallest budget that any prompt fits in.
        max_num_seqs: most requests running at once.
        enable_chunked_prefill: False computes each prompt whole, in one step.
        max_waiting: requests that may wait; one more is refused.
    """

    policy: Policy = "stall-free"
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 64
    enable_chunked_prefill: bool = True
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting must be at least 0, got {self.max_waiting}")

    def resolve(self, max_model_len: int) -> "SchedulerConfig":
        """Replace "auto" by numbers.

        Raises:
            ConfigError: without chunked prefill, a budget that the longest prompt would not fit in
                beside the running decodes, so that it could wait for ever.
        """
        whole_prompt = max_model_len + self.max_num_seqs
        budget = self.max_num_batched_tokens
        if budget is None:
            budget = 512 if self.enable_chunked_prefill else whole_prompt
        if not self.enable_chunked_prefill and budget < whole_prompt:
            raise ConfigError(
                f"without chunked prefill, max_num_batched_tokens must be at least max_model_len + "
                f"max_num_seqs = {whole_prompt}, got {budget}"
            )
        return msgspec.structs.replace(self, max_num_batched_tokens=budget)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Everything an engine is built from."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
