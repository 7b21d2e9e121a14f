"""One replica of a simulated fleet: an engine with an inbox, on a clock of its own."""

from collections.abc import Sequence

import msgspec

from legato.core.outputs import RequestOutput
from legato.core.request import Event
from legato.core.stats import EngineStats
from legato.executor.simulated import VirtualClock
from legato_fleet.routing.request import Role
from legato_lab.simulation.simulated_run import Simulable


class ReplicaRun(msgspec.Struct, frozen=True, kw_only=True):
    """The history of one replica.

    Attributes:
        started_s, ended_s: when it began to serve, and when it died, was drained, or the run ended.
        is_lost: whether it died.
        num_requests: that were sent there.
        busy_s: in steps, and between them.
        stats: at the end.
    """

    replica_id: str
    role: Role
    started_s: float
    ended_s: float
    is_lost: bool
    num_requests: int
    num_steps: int
    busy_s: float
    stats: EngineStats

    @property
    def served_s(self) -> float:
        return self.ended_s - self.started_s


class SimulatedReplica:
    """Takes its inbox, runs a step, and reacts to nothing until the step has ended.

    Its clock is ahead of the fleet's while a step runs.

    Args:
        is_sharing: whether it has a prefix cache.

    Attributes:
        ends_s: when its step ends; None while no step runs.
        is_stalled: whether all its work must wait, for example for blocks in flight.
        is_hung: whether it takes requests and does nothing else.
        is_gone: whether it has died, or was removed.
        num_steps, busy_s: the number of its steps, and their total time.
    """

    def __init__(
        self,
        replica_id: str,
        role: Role,
        server: Simulable,
        *,
        started_s: float = 0.0,
        is_sharing: bool,
    ) -> None:
        self.replica_id = replica_id
        self.role: Role = role
        self.is_gone = self.is_hung = False
        self.num_requests = 0
        self._started_s = started_s
        self.ends_s: float | None = None
        self.is_stalled = False
        self.num_steps, self.busy_s = 0, 0.0
        self._clock = VirtualClock()
        self._delays = server.delays
        self._inbox: list[Event] = []
        self._num_tokens = 0  # sampled in its last step
        self.loop, self.kv = server.start(self._clock, is_sharing=is_sharing)

    @property
    def has_work(self) -> bool:
        """Whether to begin a step once none runs."""
        return bool(self._inbox) or (self.loop.has_work and not self.is_stalled)

    def deliver(self, event: Event) -> None:
        """Add an event for its next step."""
        self._inbox.append(event)

    def run(self, now_s: float, *, is_lost: bool = False) -> ReplicaRun:
        """Return its history until now."""
        return ReplicaRun(
            replica_id=self.replica_id,
            role=self.role,
            started_s=self._started_s,
            ended_s=now_s,
            is_lost=is_lost,
            num_requests=self.num_requests,
            num_steps=self.num_steps,
            busy_s=self.busy_s,
            stats=self.loop.stats,
        )

    def begin(self, now_s: float) -> Sequence[RequestOutput]:
        """Take the inbox and run a step, which ends at `ends_s`.

        Returns:
            the outputs of the step, to deliver at its end.
        """
        events, self._inbox = self._inbox, []
        self._clock.advance_to(now_s)
        self._clock.advance_to(now_s + self._delays.turnaround(self._num_tokens))
        planned_s = self._clock.now_s
        outputs = self.loop.step(events)
        self._num_tokens = len(outputs)
        self.ends_s = self._clock.now_s
        self.is_stalled = self.ends_s == planned_s
        if not self.is_stalled:
            self.num_steps += 1
            self.busy_s += self.ends_s - now_s
        return outputs
