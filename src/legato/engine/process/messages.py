"""What crosses the boundary between the front end and the engine process."""

import logging
from collections.abc import Sequence

import msgspec

from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError, UnsupportedModelError
from legato.core.kv_events import KVEvent
from legato.core.memory import describe_shortage, is_shortage
from legato.core.outputs import RequestOutput
from legato.core.replica_state import ReplicaState
from legato.core.slo import SloClass
from legato.core.stats import CacheInfo, EngineStats
from legato.core.step_record import EngineRecord, StepBegun
from legato.engine.process.channel import Ping, Pong
from legato.text.vocabulary import Vocabulary

ANY_NAME = "*"


class SetRecording(msgspec.Struct, frozen=True, tag=True):
    """To the engine: begin or stop to make records of what it does."""

    is_on: bool


class SetAnnouncing(msgspec.Struct, frozen=True, tag=True):
    """To the engine: begin or stop to tell of each step before it is computed."""

    is_on: bool


class Reconfigure(msgspec.Struct, frozen=True, tag=True):
    """To the engine: plan by other settings, which are resolved, from the next step on."""

    scheduler: SchedulerConfig


class Delivered(msgspec.Struct, frozen=True, tag=True):
    """To the engine: a step's tokens have been handed on; see `Scheduler.note_way`."""

    later_s: float


class KnowVocabulary(msgspec.Struct, frozen=True, tag=True):
    """To the engine, once: of which tokens outputs are made."""

    vocabulary: Vocabulary


class TellState(msgspec.Struct, frozen=True, tag=True):
    """To the engine: say in what state it is."""


class WatchCache(msgspec.Struct, frozen=True, tag=True):
    """To the engine: tell what is cached, and what becomes of it from now on."""


Control = (
    SetRecording
    | SetAnnouncing
    | Reconfigure
    | Delivered
    | KnowVocabulary
    | TellState
    | WatchCache
    | Ping
)


class TransferAddress(msgspec.Struct, frozen=True):
    """Where other engines ask for blocks; at port 0 they cannot."""

    host: str
    port: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the front end needs to know of the model that runs.

    Attributes:
        model: as asked for in the configuration.
        served_model_names: the model's in the API, the first of which is told in answers.
        has_any_name: whether a request may call the model as it likes.
        max_model_len: longest prompt plus output, in tokens.
        device: the kind that it is on, "cpu" or "cuda".
        cache: size of the KV cache.
        scheduler: the settings that it was started with, with every "auto" replaced.
        settings: what "auto" was resolved to; key a flag's name, value as printed.
        rejected_kernels: native kernels that are not used because they compute wrong numbers here;
            key the set of instructions, value how they disagree with PyTorch's.
        transfer: where it sends blocks from; None where it has nothing to do with other engines.
        start_s: seconds that the parts of the start took, one after the other; key the part's name.
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
    transfer: TransferAddress | None = None

    def renamed(self, names: Sequence[str]) -> "EngineInfo":
        """The same, under the names that the API is to give the model, of which "*" is any."""
        listed = tuple(name for name in names if name != ANY_NAME)
        return msgspec.structs.replace(
            self,
            served_model_names=listed or self.served_model_names,
            has_any_name=ANY_NAME in names,
        )

    @property
    def slo_classes(self) -> dict[str, SloClass]:
        """What a request may ask to be served as; key the class's name."""
        return self.scheduler.classes

    @property
    def served_model_name(self) -> str:
        """What answers call the model."""
        return self.served_model_names[0]

    def is_called(self, name: str) -> bool:
        """Whether a request that names this model means the one that runs."""
        return self.has_any_name or name in self.served_model_names


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

    @classmethod
    def at_start(cls, error: Exception) -> "EngineFailed":
        """Why a process cannot start, in the words that its parent is told."""
        if isinstance(error, ConfigError | UnsupportedModelError):
            return cls(str(error), is_user_error=True)
        if is_shortage(error):
            return cls(describe_shortage(error), is_user_error=False)
        logging.error("the engine cannot start", exc_info=error)
        return cls(f"{type(error).__name__}: {error}", is_user_error=False)


class Taken(msgspec.Struct, frozen=True, tag=True):
    """The engine has taken in so many of the requests that it was sent; more may follow."""

    num_requests: int


class StepAnnounced(msgspec.Struct, frozen=True, tag=True):
    """A step is about to be computed; told where that was asked for."""

    step: StepBegun


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """What one step brought.

    Attributes:
        records: of the step, and where they are asked for, of the requests that came and ended.
        kv_events: what became of cached blocks, where that is watched.
    """

    outputs: list[RequestOutput]
    stats: EngineStats
    records: list[EngineRecord] = []
    kv_events: list[KVEvent] = []


class StateTold(msgspec.Struct, frozen=True, tag=True):
    """As `TellState` asked for; None where the engine failed to tell it."""

    state: ReplicaState | None


FromEngine = EngineReady | EngineFailed | Pong | Taken | StepAnnounced | StepOutputs | StateTold
