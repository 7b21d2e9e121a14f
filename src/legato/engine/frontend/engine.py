"""What a server needs of what computes."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from legato.core.config import SchedulerConfig
from legato.core.kv_transfer import KVTransfer
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.stats import EngineStats, KeptPromise, ReplicaStats
from legato.core.step_record import RequestSent
from legato.engine.frontend.activity import Activity
from legato.engine.frontend.kv_tickets import Tickets
from legato.engine.frontend.submission import Submission, Take
from legato.engine.process.messages import EngineInfo
from legato.text.vocabulary import Vocabulary


class Engine(Protocol):
    """Takes tokens and gives tokens, whether by a process beside the server or by many elsewhere.

    Attributes:
        info: what there is to know of the model that runs.
        vocabulary: what its tokens stand for.
        tickets: what requests say of blocks and other engines.
        activity: what it does, for those who watch.
        stats: its numbers, as of the latest step.
        replicas: those of each replica, where it is a fleet; key the replica's id.
        is_alive: whether it serves, or will again.
        death: why it does not, if so.
        num_restarts: of its processes, from the start.
        num_stuck: of these processes, those that were killed because they neither answered nor
            computed.
        problem: why it may be about to be started again; empty if nothing is wrong.
        pids: of its processes on this machine; key a process's name.
        scheduler_config: the settings in effect, as they were asked for.
        most_batched_tokens: the largest token budget that `reconfigure` takes.
        num_unfinished, unfinished: requests that have come and not ended, in the order in which
            they came.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def vocabulary(self) -> Vocabulary: ...

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
    def scheduler_config(self) -> SchedulerConfig: ...

    @property
    def most_batched_tokens(self) -> int: ...

    @property
    def num_unfinished(self) -> int: ...

    @property
    def unfinished(self) -> list[RequestSent]: ...

    def check_running(self) -> None:
        """Raises `EngineDeadError` where nothing is served just now."""
        ...

    def kept(self) -> dict[str, KeptPromise]:
        """What is promised of gaps between tokens, and delivered; key the class."""
        ...

    def reconfigure(self, scheduler: SchedulerConfig) -> None:
        """Plan by other settings from the next step on; requests that run go on.

        Args:
            scheduler: with the same `max_num_seqs` and the same classes of service by name.

        Raises:
            ConfigError: they contradict each other, or want larger steps than may be run.
            EngineDeadError: nothing is served just now.
        """
        ...

    def submitted(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        service: ServiceParams,
        request_id: str,
        take: Take,
        kv_transfer: KVTransfer | None = None,
        arrived_s: float | None = None,
    ) -> AbstractAsyncContextManager[Submission]:
        """Have the `params.n` completions of each prompt made; leaving aborts what still runs.

        Args:
            prompts: token ids of each.
            take: given each delta, as it comes.
            kv_transfer: what becomes of the blocks of the only prompt between this engine and
                another, as `tickets` read it.
            arrived_s: when the request arrived, on the clock of `time.monotonic`; None for now.
                Deadlines count from then, as metrics do.

        Raises:
            InvalidRequestError: a prompt can never be served as asked.
            EngineDeadError: nothing is served just now.

        `Submission.check` raises what comes later:
            OverloadedError: too many requests are waiting, or the TTFT SLO cannot be met.
            RequestFailedError: one of the prompts cannot be computed.
            EngineDeadError: what computed it died under it.
            Exception: what `take` raised.
        """
        ...

    async def close(self, *, at_once: bool = False) -> None:
        """End it; what still runs is lost.

        Args:
            at_once: without waiting for the end of a step.
        """
        ...
