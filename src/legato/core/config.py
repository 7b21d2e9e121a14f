"""Settings, one frozen value a subsystem, built once at the edge and validated there."""

import math
from typing import Literal

import msgspec

from legato.core.errors import ConfigError
from legato.core.slo import BATCH, INTERACTIVE, SloClass

DType = Literal["auto", "bfloat16", "float16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
Kernels = Literal["auto", "amx", "avx512", "avx2", "torch"]
Quantization = Literal["int8", "int4", "gguf"]
Policy = Literal["stall-free", "prefill-first"]
PrefillOrder = Literal["fcfs", "srf", "edf", "lpm"]

_IDLE_SHARE = 0.25
"""Of the tightest TTFT SLO, for a step that nobody's next token waits for."""

DEFAULT_MODEL = "smollm2-135m-instruct"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model to run, and how.

    Attributes:
        model: a Hugging Face folder or hub id, a path to a GGUF file, or `DEFAULT_MODEL`.
        revision: branch, tag or commit of a hub model.
        dtype: of weights and cache; "auto" takes the checkpoint's, bfloat16 for a GGUF file.
        max_model_len: longest prompt plus output in tokens; None takes the model's own.
        num_threads: of the forward pass on CPU; None takes one a core.
        quantization: of weights, in blocks of 32: "int8" and "int4" round what the checkpoint has,
            "gguf" keeps what a GGUF file has in Q8_0, Q4_0 or Q4_1; None takes them in `dtype`.
        kernels: that compute the layers: Legato's own for a set of instructions, or PyTorch's;
            "auto" takes the fastest that can run.
    """

    model: str = DEFAULT_MODEL
    revision: str | None = None
    dtype: DType = "auto"
    device: Device = "auto"
    max_model_len: int | None = None
    num_threads: int | None = None
    quantization: Quantization | None = None
    kernels: Kernels = "auto"


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size of the paged KV cache.

    Attributes:
        block_size: tokens a block.
        kv_cache_memory_bytes: size of the cache, which on a CPU is taken from the machine at once;
            None allows it `memory_utilization` of what is free, taken as it is used.
        memory_utilization: fraction of the free memory, in (0, 1]; None takes 0.9 of a GPU's and
            0.25 of the host's, which other programs want too.
        enable_prefix_caching: keep blocks of prompts and outputs, and share them among requests
            that begin alike.
        swap_space_bytes: of host memory, for blocks that are evicted.
    """

    block_size: int = 32
    kv_cache_memory_bytes: int | None = None
    memory_utilization: float | None = None
    enable_prefix_caching: bool = True
    swap_space_bytes: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1, got {self.block_size}")
        if self.memory_utilization is not None and not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(
                f"memory utilization must be in (0, 1], got {self.memory_utilization}"
            )
        if self.swap_space_bytes and not self.enable_prefix_caching:
            raise ConfigError("swap space is for blocks of the prefix cache, which is turned off")


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may run in one step, and what is promised.

    Attributes:
        max_num_batched_tokens: token budget of a step; None takes 512, or where a latency promise
            bounds the step 2048, or without chunked prefill the smallest that any prompt fits in.
        max_num_seqs: most requests running at once.
        enable_chunked_prefill: False computes each prompt whole, in one step.
        max_waiting: requests that may wait; one more is refused.
        prefill_order: who gets the prefill tokens; None takes "edf" where a TTFT is promised, else
            "fcfs".
        itl_slo_s, tpot_slo_s, ttft_slo_s: promises of the class "interactive", which is every
            request's that names none; see `SloClass`.
        slo_classes: further classes; key the name. "batch" is there without being told.
        shed_load: refuse a request at once whose TTFT SLO cannot be met.
        admission_optimism: how little room is kept for what running requests still generate, in
            [0, 1]: at 0 for all that they may, at 1 for the next token.
    """

    policy: Policy = "stall-free"
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 64
    enable_chunked_prefill: bool = True
    max_waiting: int = 1024
    prefill_order: PrefillOrder | None = None
    itl_slo_s: float | None = None
    tpot_slo_s: float | None = None
    ttft_slo_s: float | None = None
    slo_classes: dict[str, SloClass] = msgspec.field(default_factory=dict)
    shed_load: bool = False
    admission_optimism: float = 0.5

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting must be at least 0, got {self.max_waiting}")
        if not 0.0 <= self.admission_optimism <= 1.0:
            raise ConfigError(
                f"admission_optimism must be in [0, 1], got {self.admission_optimism}"
            )
        if INTERACTIVE in self.slo_classes:
            raise ConfigError(f'class "{INTERACTIVE}" is set by itl_slo_s, tpot_slo_s, ttft_slo_s')
        if self.promises_pace and not self.enable_chunked_prefill:
            raise ConfigError("an ITL or TPOT SLO cannot be kept without chunked prefill")
        if self.promises_pace and self.policy == "prefill-first":
            raise ConfigError("an ITL or TPOT SLO cannot be kept with policy prefill-first")
        if self.shed_load and not self.promises_ttft:
            raise ConfigError("shed_load refuses what would miss its TTFT SLO, but none is set")

    @property
    def classes(self) -> dict[str, SloClass]:
        """All classes of service; key the name."""
        interactive = SloClass(itl_s=self.itl_slo_s, tpot_s=self.tpot_slo_s, ttft_s=self.ttft_slo_s)
        return {INTERACTIVE: interactive, BATCH: SloClass(), **self.slo_classes}

    @property
    def promises_pace(self) -> bool:
        """Whether any class bounds the length of a step."""
        return any(slo.step_s is not None for slo in self.classes.values())

    @property
    def idle_limit_s(self) -> float:
        """How long a step may take in which no token is due: who arrives meanwhile waits for it."""
        if not self.promises_pace:
            return math.inf
        ttfts_s = (slo.ttft_s for slo in self.classes.values() if slo.ttft_s is not None)
        return _IDLE_SHARE * min(ttfts_s, default=math.inf)

    @property
    def promises_ttft(self) -> bool:
        return any(slo.ttft_s is not None for slo in self.classes.values())

    def whole_prompt_tokens(self, max_model_len: int) -> int:
        """A step that holds the longest prompt beside all decodes."""
        return max_model_len + self.max_num_seqs

    def resolve(self, max_model_len: int) -> "SchedulerConfig":
        """Replace "auto" by numbers.

        Raises:
            ConfigError: without chunked prefill, a budget that the longest prompt would not fit in
                beside the running decodes, so that it could wait for ever.
        """
        whole_prompt = self.whole_prompt_tokens(max_model_len)
        budget = self.max_num_batched_tokens
        if budget is None:
            chunked = 2048 if self.promises_pace else 512
            budget = chunked if self.enable_chunked_prefill else whole_prompt
        if not self.enable_chunked_prefill and budget < whole_prompt:
            raise ConfigError(
                f"without chunked prefill, max_num_batched_tokens must be at least max_model_len + "
                f"max_num_seqs = {whole_prompt}, got {budget}"
            )
        order = self.prefill_order or ("edf" if self.promises_ttft else "fcfs")
        return msgspec.structs.replace(self, max_num_batched_tokens=budget, prefill_order=order)


class CalibrationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the step-time model is fitted.

    Attributes:
        calibrate: measure at start-up where no earlier measurement is on disk and a promise is
            made; False begins with no knowledge and learns from the steps that run.
        calibration_dir: where measurements are kept; None takes the user's cache folder.
    """

    calibrate: bool = True
    calibration_dir: str | None = None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Everything an engine is built from."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    calibration: CalibrationConfig = CalibrationConfig()
