"""Messages between the front end and the engine process."""

import logging
from collections.abc import Sequence

import msgspec

from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError, UnsupportedModelError
from legato.core.kv_events import KVEvent
from legato.core.memory_limits import describe_shortage, is_shortage
from legato.core.outputs import RequestOutput
from legato.core.pooling import Pooling
from legato.core.replica_state import ReplicaState
from legato.core.slo import SloClass
from legato.core.stats import CacheInfo, EngineStats
from legato.core.step_record import EngineRecord, StepBegun
from legato.core.vocabulary import Vocabulary
from legato.engine.process.channel import Ping, Pong

ANY_NAME = "*"
_LATEST = ":latest"
"""Ollama's tag of a model that is named without one."""


class SetRecording(msgspec.Struct, frozen=True, tag=True):
    """To the engine: start or stop to record all that it does."""

    is_on: bool


class SetAnnouncing(msgspec.Struct, frozen=True, tag=True):
    """To the engine: start or stop to announce each step before it is computed."""

    is_on: bool


class Reconfigure(msgspec.Struct, frozen=True, tag=True):
    """To the engine: plan by these settings from the next step on; they hold no "auto"."""

    scheduler: SchedulerConfig


class ForgetCache(msgspec.Struct, frozen=True, tag=True):
    """To the engine: forget all cached blocks that no request uses."""


class StepDelivered(msgspec.Struct, frozen=True, tag=True):
    """To the engine: a step's tokens were delivered; see `Scheduler.record_delivery`."""

    delay_change_s: float


class SetVocabulary(msgspec.Struct, frozen=True, tag=True):
    """To the engine, once: the vocabulary, for grammars."""

    vocabulary: Vocabulary


class GetState(msgspec.Struct, frozen=True, tag=True):
    """To the engine: report the state."""


class WatchCache(msgspec.Struct, frozen=True, tag=True):
    """To the engine: report what is cached, and changes from now on."""


Control = (
    SetRecording
    | SetAnnouncing
    | Reconfigure
    | ForgetCache
    | StepDelivered
    | SetVocabulary
    | GetState
    | WatchCache
    | Ping
)


class TransferAddress(msgspec.Struct, frozen=True):
    """Where other engines ask for blocks; with port 0 they cannot."""

    host: str
    port: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a running engine to the front end.

    Attributes:
        model: as in the configuration.
        served_model_names: the model's names in the API; answers have the first.
        has_any_name: whether a request may give the model any name.
        max_model_len: longest prompt plus output, in tokens.
        device: "cpu" or "cuda".
        cache: size of the KV cache.
        scheduler: the settings that it was started with, with every "auto" replaced.
        settings: all settings as printed; key: the flag's name.
        rejected_kernels: native kernels that are not used because they compute wrong numbers here;
            key: the instruction set, value: how they disagree with PyTorch's.
        cut_sizes: sizes that were cut to what the machine has; key the flag, value how.
        transfer: where other engines fetch its blocks; None if it is connected to none.
        hidden_size: of its vectors.
        pooling: how prompts become vectors.
        generates: whether it has an output projection to sample tokens by.
        num_labels: outputs of its classification head; 0 without one.
        architecture: the checkpoint's; empty if there is no checkpoint.
        num_parameters, weight_bytes: of its files; likewise 0.
        quantization: how the files keep their weights.
        cache_bytes: memory of the KV cache.
        start_s: seconds that the parts of the start took; key: the part's name.
    """

    model: str
    served_model_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    cache: CacheInfo
    scheduler: SchedulerConfig
    settings: dict[str, str]
    start_s: dict[str, float] = {}
    has_any_name: bool = False
    device: str = "cpu"
    rejected_kernels: dict[str, str] = {}
    cut_sizes: dict[str, str] = {}
    transfer: TransferAddress | None = None
    hidden_size: int = 0
    pooling: Pooling = "last"
    generates: bool = True
    num_labels: int = 0
    architecture: str = ""
    num_parameters: int = 0
    weight_bytes: int = 0
    quantization: str = "none"
    cache_bytes: int = 0

    def renamed(self, names: Sequence[str]) -> "EngineInfo":
        """Return a copy with these names for the model in the API; "*" stands for any name."""
        listed = tuple(name for name in names if name != ANY_NAME)
        return msgspec.structs.replace(
            self,
            served_model_names=listed or self.served_model_names,
            has_any_name=ANY_NAME in names,
        )

    @property
    def slo_classes(self) -> dict[str, SloClass]:
        """The classes of service that requests may ask for; key: the class's name."""
        return self.scheduler.classes

    @property
    def served_model_name(self) -> str:
        """The model's name in answers."""
        return self.served_model_names[0]

    def is_called(self, name: str) -> bool:
        """Return whether a request with this model name is for this engine.

        As for Ollama, a name without a tag has the tag `latest`.
        """
        served = {one.removesuffix(_LATEST) for one in self.served_model_names}
        return self.has_any_name or name.removesuffix(_LATEST) in served


class StartPartEnded(msgspec.Struct, frozen=True, tag=True):
    """A part of the start ended; sent before `EngineReady`. Attributes: as of `StartTimer`."""

    name: str
    seconds: float


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded."""

    info: EngineInfo


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start, or cannot go on.

    Attributes:
        is_user_error: whether the settings or the checkpoint caused it.
    """

    error: str
    is_user_error: bool

    @classmethod
    def at_start(cls, error: Exception) -> "EngineFailed":
        """Describe an error at the start to the parent process."""
        if isinstance(error, ConfigError | UnsupportedModelError):
            return cls(str(error), is_user_error=True)
        if is_shortage(error):
            return cls(describe_shortage(error), is_user_error=False)
        logging.error("the engine cannot start", exc_info=error)
        return cls(f"{type(error).__name__}: {error}", is_user_error=False)


class Taken(msgspec.Struct, frozen=True, tag=True):
    """The engine has taken so many of the requests that were sent; more may follow."""

    num_requests: int


class StepAnnounced(msgspec.Struct, frozen=True, tag=True):
    """A step is about to be computed; sent if `SetAnnouncing` asked for it."""

    step: StepBegun


class LongStepBegins(msgspec.Struct, frozen=True, tag=True):
    """A step begins that should take long; the engine cannot answer before its end."""

    predicted_s: float


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """The outputs of one step.

    Attributes:
        records: the step's record; while recording is on, also of requests that came and ended.
        kv_events: changes of cached blocks, if the cache is watched.
    """

    outputs: list[RequestOutput]
    stats: EngineStats
    records: list[EngineRecord] = []
    kv_events: list[KVEvent] = []


class StateReport(msgspec.Struct, frozen=True, tag=True):
    """The answer to `GetState`; None if the engine failed to report it."""

    state: ReplicaState | None


FromEngine = (
    StartPartEnded
    | EngineReady
    | EngineFailed
    | Pong
    | Taken
    | StepAnnounced
    | LongStepBegins
    | StepOutputs
    | StateReport
)
