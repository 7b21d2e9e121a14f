"""The interface of an engine towards its server."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from legato.checkpoint.defaults import ModelDefaults
from legato.core.config import SchedulerConfig
from legato.core.request import AddRequest
from legato.core.stats import EngineStats, KeptPromise, ReplicaStats
from legato.core.step_record import RequestSent
from legato.core.vocabulary import Vocabulary
from legato.engine.client.kv_tickets import Tickets
from legato.engine.client.settings import RunningSettings
from legato.engine.client.submissions import Submission, Take
from legato.engine.process.engine_messages import EngineInfo
from legato.observe.traces.feed import Activity


class Engine(Protocol):
    """Completes prompts, in a process beside the server or in many elsewhere.

    Attributes:
        info: describes the running model.
        vocabulary: the model's tokens.
        defaults: the checkpoint's end tokens and its recommendations for sampling.
        tickets: reads and writes requests' parameters for transfers between engines.
        activity: publishes records of the engine's work.
        stats: its counters after the latest step.
        replicas: those of each replica of a fleet; key the replica's id.
        is_alive: whether it serves, or will again.
        death: why it will not serve again; empty if it may.
        num_restarts: of its processes, since the start.
        num_stuck: processes killed because they did not answer.
        problem: why it may soon be restarted; empty if nothing is wrong.
        pids: of its processes on this machine; key a process's name.
        settings: the scheduler's, which `reconfigure` changes.
        num_unfinished, unfinished: requests that have come and not ended, in the order in which
            they came.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def defaults(self) -> ModelDefaults: ...

    @property
    def tickets(self) -> Tickets: ...

    @property
    def activity(self) -> Activity: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def replicas(self) -> Mapping[str, ReplicaStats]: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def death(self) -> str: ...

    @property
    def num_restarts(self) -> int: ...

    @property
    def num_stuck(self) -> int: ...

    @property
    def problem(self) -> str: ...

    @property
    def pids(self) -> dict[str, int]: ...

    @property
    def settings(self) -> RunningSettings: ...

    @property
    def num_unfinished(self) -> int: ...

    @property
    def unfinished(self) -> list[RequestSent]: ...

    def check_running(self) -> None:
        """Raises `EngineDeadError` if it cannot serve at the moment."""
        ...

    def kept(self) -> dict[str, KeptPromise]:
        """Return the promises on gaps between tokens and what was delivered; key the class."""
        ...

    def reconfigure(self, scheduler: SchedulerConfig) -> None:
        """Use other settings from the next step on; running requests continue.

        All that watch `settings` are called.

        Args:
            scheduler: with the same `max_num_seqs` and the same classes of service by name.

        Raises:
            ConfigError: they contradict each other, or want larger steps than may be run.
            EngineDeadError: it cannot serve at the moment.
        """
        ...

    def forget_cache(self) -> None:
        """Forget all cached blocks that no request uses.

        Raises:
            EngineDeadError: it cannot serve at the moment.
        """
        ...

    def submitted(
        self, requests: Iterable[AddRequest], take: Take
    ) -> AbstractAsyncContextManager[Submission]:
        """Run requests together; leaving the block aborts the unfinished ones.

        Args:
            requests: as made by `build_requests`, with ids that no other request has. Each is made
                when it is sent, and other streams are served in between.
            take: called with each output as it comes; see `Take`.

        Raises:
            EngineDeadError: it cannot serve at the moment.
            Exception: what making a request raises.

        `Submission.check` raises later errors:
            OverloadedError: too many requests are waiting, or the TTFT SLO cannot be met.
            RequestFailedError: one of the prompts cannot be computed.
            EngineDeadError: the engine died during the request.
            Exception: what `take` raised.
        """
        ...

    async def close(self, *, at_once: bool = False) -> None:
        """End the engine; unfinished requests are lost.

        Args:
            at_once: do not wait for the end of a step.
        """
        ...
