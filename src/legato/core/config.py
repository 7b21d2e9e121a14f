"""Settings: one frozen struct per subsystem, built and validated once at the edge."""

import math
from functools import partial
from typing import Annotated, Any, Literal

import msgspec

from legato.core.cache_config import CacheConfig, TransferConfig
from legato.core.config_fields import Config, Field, Flag, fields_of
from legato.core.errors import ConfigError
from legato.core.pooling import Pooling
from legato.core.ranges import Count, CountOrZero, Seconds, Slack
from legato.core.slo import BATCH, INTERACTIVE, LEAST_QUANTILE, MOST_QUANTILE, P99, SloClass
from legato.core.spelling import did_you_mean
from legato.core.tenant import TenantName

DType = Literal["auto", "bfloat16", "float16", "float32"]
Device = Literal["auto", "cpu", "cuda"]
Kernels = Literal["auto", "amx", "avx512", "avx2", "plain", "torch"]
Quantization = Literal["none", "int8", "int4", "w8a8", "w4a8", "fp8", "gguf"]
LoadFormat = Literal["auto", "dummy"]
ModelImpl = Literal["auto", "legato", "transformers"]
Policy = Literal["stall-free", "prefill-first"]
NumDrafts = Annotated[int, msgspec.Meta(ge=1, le=64)]
Speculative = NumDrafts | Literal["auto", "off"]
PrefillOrder = Literal["slowdown", "fcfs", "edf", "lpm"]
Quantile = Annotated[float, msgspec.Meta(ge=LEAST_QUANTILE, le=MOST_QUANTILE)]
SloClassName = Annotated[str, msgspec.Meta(min_length=1)]
Weight = Annotated[float, msgspec.Meta(ge=0.001, le=1000.0)]

Ranks = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Threads = Annotated[int, msgspec.Meta(ge=1, le=4096)]
StepsInFlight = Annotated[int, msgspec.Meta(ge=1, le=2)]

_IDLE_SHARE = 0.25
"""Share of the tightest TTFT SLO that a step may take if no token is due."""

DEFAULT_MODEL = "smollm2-135m-instruct"

_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
_BUDGETS = {"cpu": (512, 2048), "cuda": (8192, 8192)}
"""Tokens of a step without and with an ITL or TPOT SLO; key the kind of device, as below."""
_STEPS_IN_FLIGHT = {"cpu": 1, "cuda": 2}

_promise = partial(Flag, group="promises")


class ModelConfig(Config, frozen=True, kw_only=True):
    """Which model to run, and how."""

    flag_group = "model"

    model: Annotated[str, Flag("Hugging Face folder or hub id, or path to a GGUF file")] = (
        DEFAULT_MODEL
    )
    revision: Annotated[str | None, Flag("branch, tag or commit of a hub model")] = None
    load_format: Annotated[
        LoadFormat,
        Flag(
            "where weights come from: the model's files, or dummy: random ones from a fixed seed, "
            "by config.json alone",
            default="what the files are",
        ),
    ] = "auto"
    model_impl: Annotated[
        ModelImpl,
        Flag(
            "whose layers run the model on a CPU: Legato's own, or transformers', with Legato's "
            "attention and projections",
            default="Legato's own if they know the architecture",
        ),
    ] = "auto"
    tokenizer: Annotated[
        str | None,
        Flag(
            "another tokenizer: a folder with tokenizer.json, a hub id, or a GGUF file's",
            metavar="MODEL",
            default="the model's own",
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        Flag(
            "another chat template: a file, or the template itself",
            metavar="FILE|TEXT",
            default="the tokenizer's own",
        ),
    ] = None
    dtype: Annotated[
        DType,
        Flag(
            "data type of weights and cache, unless --kv-cache-dtype says otherwise",
            default="the checkpoint's own, bfloat16 for a GGUF file",
        ),
    ] = "auto"
    device: Annotated[Device, Flag("where to run", default="a GPU if there is one")] = "auto"
    max_model_len: Annotated[
        Count | None,
        Flag("longest prompt plus output", metavar="TOKENS", default="the model's own"),
    ] = None
    num_threads: Annotated[
        Threads | None,
        Flag(
            "threads of the forward pass on CPU, of all ranks together",
            default="one a core that affinity and control groups allow",
        ),
    ] = None
    tensor_parallel_size: Annotated[
        Ranks,
        Flag(
            "ranks, each a process, and a GPU where there are some, among which every layer is "
            "divided; heads, recurrent mixers and MLP must divide evenly",
            metavar="RANKS",
        ),
    ] = 1
    quantization: Annotated[
        Quantization | None,
        Flag(
            "how weights are held: in the dtype (none); in blocks of 32, rounded to 8 or 4 bits "
            "(int8, int4); in codes as a GGUF file has them; or multiplied with activations of 8 "
            "bits, integers on a CPU (w8a8, w4a8), floats on a GPU (fp8)",
            default="as a quantized file has them, else in the dtype",
        ),
    ] = None
    kernels: Annotated[
        Kernels,
        Flag(
            "what computes the layers: Legato's own kernels for a set of instructions, which want "
            "bfloat16, or PyTorch's; plain ones are for processors that are not x86-64, and only "
            "on request",
            default="the fastest that can run",
        ),
    ] = "auto"
    pooling: Annotated[
        Pooling | None,
        Flag(
            "what an embedding is made of: the last token's hidden state, or the mean of all",
            default="what the checkpoint's sentence-transformers files say, else last",
        ),
    ] = None
    speculative_model: Annotated[
        str | None,
        Flag(
            "draft model on a CPU, of the same vocabulary: a small model that guesses tokens "
            "where that is worth its time, beside what --speculative looks up",
            metavar="MODEL",
            default="none",
        ),
    ] = None


class SchedulerConfig(Config, frozen=True, kw_only=True):
    """Promises, and limits of one step.

    The SLOs define the class "interactive", the class of requests that name none. The class "batch"
    always exists.
    """

    flag_group = "scheduler"

    itl_slo_s: Annotated[
        Seconds | None,
        _promise(
            "each token comes at most this long after the one before it, such as 100ms; chunks "
            "are as long as that allows. It is for 99 of 100 gaps of a request; 100ms:p99.9 "
            "promises more. auto promises nothing, but bounds steps beside streams by what a "
            "reader does not notice; off by half a second",
            metavar="auto|off|TIME[:pQ]",
            default="auto for a server, else off",
        ),
    ] = None
    itl_slo_quantile: Annotated[
        Quantile, _promise("share of a request's gaps that `itl_slo_s` is for", behind="itl_slo_s")
    ] = P99
    bounds_gaps: Annotated[
        bool,
        _promise("whether steps beside streams are short without a promise", behind="itl_slo_s"),
    ] = False
    tpot_slo_s: Annotated[
        Seconds | None,
        _promise("token k comes at most k times this after the first: single gaps may be longer"),
    ] = None
    ttft_slo_s: Annotated[
        Seconds | None,
        _promise("the first token comes at most this long after the request, such as 2s"),
    ] = None
    slo_classes: Annotated[
        dict[SloClassName, SloClass],
        _promise(
            'further class that requests may ask for by slo_class, beside "interactive", which has '
            'the SLOs above, and "batch", which has none; may be repeated',
            name="slo-class",
        ),
    ] = msgspec.field(default_factory=dict)
    shed_load: Annotated[
        bool, _promise("refuse a request at once whose TTFT SLO cannot be met")
    ] = False
    max_num_batched_tokens: Annotated[
        Count | None,
        Flag(
            "token budget of a step",
            metavar="TOKENS",
            default="512; 2048 under an ITL or TPOT SLO; 8192 on a GPU; without chunked prefill "
            "the smallest that any prompt fits in",
        ),
    ] = None
    max_num_seqs: Annotated[
        Count | None, Flag("most requests running at once", default="64; 256 on a GPU")
    ] = None
    num_steps_in_flight: Annotated[
        StepsInFlight | None,
        Flag(
            "steps that a GPU is given at once: with 2 it goes on to the next while the tokens of "
            "the last are read",
            default="2 on a GPU, 1 on a CPU",
        ),
    ] = None
    max_waiting: Annotated[CountOrZero, Flag("requests that may wait; one more is refused")] = 1024
    max_wait_s: Annotated[
        Seconds,
        Flag(
            "how long a tenant that runs less than others waits at most, or its TTFT SLO if that "
            "is less; it then goes first, at the cost of promises if nothing of it runs",
            metavar="TIME",
            name="max-wait",
        ),
    ] = 10.0
    tenant_weights: Annotated[
        dict[TenantName, Weight],
        Flag(
            "a tenant's share of the engine beside others, each of which weighs 1; may be repeated",
            metavar="NAME=WEIGHT",
            name="tenant-weight",
        ),
    ] = msgspec.field(default_factory=dict)
    admission_optimism: Annotated[
        float,
        msgspec.Meta(ge=0.0, le=1.0),
        Flag(
            "room in the cache for tokens that running requests may still generate: 0 keeps all, "
            "so that no request is preempted; 1 keeps one token each, so that most requests run",
            metavar="FRACTION",
        ),
    ] = 0.5
    policy: Annotated[Policy, Flag("who goes first in a step")] = "stall-free"
    prefill_order: Annotated[
        PrefillOrder,
        Flag(
            "whose prompt goes first: the one whose first token would be late most by what it "
            "takes alone, first come, earliest TTFT deadline, or longest "
            "prefix match in the cache"
        ),
    ] = "slowdown"
    enable_chunked_prefill: Annotated[
        bool, Flag("compute long prompts in chunks, not each whole in one step")
    ] = True
    speculative: Annotated[
        Speculative,
        Flag(
            "tokens guessed ahead of a stream and verified in one step: auto drafts as many as "
            "are worth their time, a number that many while the step ends in time; drafts change "
            "when tokens come, in fp32 never which",
            metavar="auto|off|K",
        ),
    ] = "auto"
    speculative_slack: Annotated[
        Slack,
        Flag(
            "how much longer drafts of other streams may make a stream wait for a token on "
            "average, with --speculative auto; unbounded drafts for the most tokens a second of "
            "all streams"
        ),
    ] = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if INTERACTIVE in self.slo_classes:
            raise ConfigError(f'class "{INTERACTIVE}" is set by itl_slo_s, tpot_slo_s, ttft_slo_s')
        if self.itl_slo_s is None and self.itl_slo_quantile != P99:
            raise ConfigError("itl_slo_quantile is of itl_slo_s, which is not set")
        if self.itl_slo_s is not None and self.bounds_gaps:
            raise ConfigError("itl_slo_s bounds gaps already: bounds_gaps is without it")
        if self.promises_pace and not self.enable_chunked_prefill:
            raise ConfigError("an ITL or TPOT SLO cannot be kept without chunked prefill")
        if self.promises_pace and self.policy == "prefill-first":
            raise ConfigError("an ITL or TPOT SLO cannot be kept with policy prefill-first")
        if self.shed_load and not self.promises_ttft:
            raise ConfigError("shed_load refuses what would miss its TTFT SLO, but none is set")

    @property
    def classes(self) -> dict[str, SloClass]:
        """All classes of service; key the name."""
        interactive = SloClass(
            itl_s=self.itl_slo_s,
            itl_quantile=self.itl_slo_quantile,
            tpot_s=self.tpot_slo_s,
            ttft_s=self.ttft_slo_s,
        )
        return {INTERACTIVE: interactive, BATCH: SloClass(), **self.slo_classes}

    @property
    def promises_pace(self) -> bool:
        """Whether any class bounds the length of a step."""
        return self.shortest_promise_s < math.inf

    @property
    def shortest_promise_s(self) -> float:
        """The longest step that every stream can bear again and again; infinite if all can."""
        promises_s = (slo.promise_s for slo in self.classes.values() if slo.promise_s is not None)
        return min(promises_s, default=math.inf)

    @property
    def idle_limit_s(self) -> float:
        """Limit of a step in which no token is due: requests that arrive meanwhile wait for it."""
        if not self.promises_pace:
            return math.inf
        ttfts_s = (slo.ttft_s for slo in self.classes.values() if slo.ttft_s is not None)
        return _IDLE_SHARE * min(ttfts_s, default=math.inf)

    @property
    def promises_ttft(self) -> bool:
        return any(slo.ttft_s is not None for slo in self.classes.values())

    @property
    def most_samples(self) -> int:
        """Most rows of a step that may be sampled: one for each stream, and drafts."""
        assert self.max_num_seqs is not None
        return self.max_num_seqs + (0 if self.speculative == "off" else max(64, self.max_num_seqs))

    def whole_prompt_tokens(self, max_model_len: int) -> int:
        """Return the tokens of a step with the longest prompt beside all decodes."""
        assert self.max_num_seqs is not None
        return max_model_len + self.max_num_seqs

    def most_batched_tokens(
        self, max_model_len: int, device: str, *, has_windows: bool = False
    ) -> int:
        """Return the largest token budget that a running server may be changed to.

        On a CPU it is large enough for any whole prompt. A GPU's memory for steps is allocated at
        the start, so its budget cannot grow, and so are the blocks of window groups.

        Args:
            has_windows: whether the cache has window groups.
        """
        assert self.max_num_batched_tokens is not None
        if device != "cpu" or has_windows:
            return self.max_num_batched_tokens
        return max(self.max_num_batched_tokens, self.whole_prompt_tokens(max_model_len))

    def resolve(self, max_model_len: int, device: str = "cpu") -> "SchedulerConfig":
        """Replace "auto" by numbers.

        Args:
            device: the kind that the model is on, "cpu" or "cuda".

        Raises:
            ConfigError: without chunked prefill, the longest prompt would not fit into the budget
                beside the running decodes, so it could wait for ever.
        """
        if self.max_num_seqs is None:
            running = msgspec.structs.replace(self, max_num_seqs=_MAX_NUM_SEQS[device])
            return running.resolve(max_model_len, device)
        whole_prompt = self.whole_prompt_tokens(max_model_len)
        budget = self.max_num_batched_tokens
        if budget is None:
            chunked = _BUDGETS[device][self.promises_pace]
            budget = chunked if self.enable_chunked_prefill else whole_prompt
        if not self.enable_chunked_prefill and budget < whole_prompt:
            raise ConfigError(
                f"without chunked prefill, max_num_batched_tokens must be at least max_model_len + "
                f"max_num_seqs = {whole_prompt}, got {budget}"
            )
        return msgspec.structs.replace(
            self,
            max_num_batched_tokens=budget,
            num_steps_in_flight=self.num_steps_in_flight or _STEPS_IN_FLIGHT[device],
        )


class CalibrationConfig(Config, frozen=True, kw_only=True):
    """How the step-time model is fitted."""

    flag_group = "promises"

    calibrate: Annotated[
        bool,
        Flag(
            "where an SLO needs it, measure how long steps take at start-up, unless that is on "
            "disk from an earlier start; otherwise learn it from the steps that run"
        ),
    ] = True
    calibration_dir: Annotated[
        str | None,
        Flag("where measurements are kept", metavar="FOLDER", default="in the user's cache folder"),
    ] = None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Everything an engine is built from."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    calibration: CalibrationConfig = CalibrationConfig()
    transfer: TransferConfig = TransferConfig()

    def __post_init__(self) -> None:
        if self.model.speculative_model is not None and self.scheduler.speculative == "off":
            raise ConfigError("--speculative-model drafts tokens, which --speculative off forbids")
        if self.model.speculative_model is not None and self.model.tensor_parallel_size > 1:
            raise ConfigError(
                "a draft model runs in one process: --speculative-model does not go with "
                "--tensor-parallel-size"
            )
        if self.transfer.kv_role is not None and not self.cache.enable_prefix_caching:
            raise ConfigError("--kv-role needs the prefix cache, which is turned off")
        if self.transfer.kv_role is not None and self.model.tensor_parallel_size > 1:
            raise ConfigError(
                "--kv-role moves whole blocks, of which ranks have a part each: it does not go "
                "with --tensor-parallel-size"
            )

    @classmethod
    def of(cls, **settings: Any) -> "EngineConfig":
        """Make a configuration from fields of all parts, by their names.

        Raises:
            TypeError: no part has such a field.
            ConfigError: a value is out of range, or contradicts another one.
        """
        parts: dict[str, Any] = {}
        for part, config in engine_parts().items():
            names = [name for name in config.__struct_fields__ if name in settings]
            parts[part] = config(**{name: settings.pop(name) for name in names})
        for name in settings:
            hint = did_you_mean(name, (field.name for field in engine_fields()))
            raise TypeError(f"there is no setting {name!r}{hint}")
        return cls(**parts)


def engine_parts() -> dict[str, type[Config]]:
    """Return the parts of an `EngineConfig`; key the part's name."""
    return {part.name: part.type for part in msgspec.structs.fields(EngineConfig)}


def engine_fields() -> list[Field]:
    """Return all settings of an engine; no two have the same name."""
    return [field for config in engine_parts().values() for field in fields_of(config)]
