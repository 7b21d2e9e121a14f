"""Serves a workload by a fleet on a virtual clock: its router, and an engine for each replica."""

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import count

import msgspec

from legato.bench.load.record import OnProgress, RequestRecord, StopWhen
from legato.bench.simulation.clients import SimulatedClients
from legato.bench.simulation.fleet import SimulatedFleet
from legato.bench.simulation.handover import Handovers
from legato.bench.simulation.link import Traffic
from legato.bench.simulation.replica import SimulatedReplica
from legato.bench.simulation.run import check_servable
from legato.bench.workload.requests import Workload
from legato.core.block_hash import block_hashes
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AbortRequest, AddRequest, Event
from legato.core.stats import EngineStats
from legato.routing.request import Placement, Role, RoutedRequest
from legato.routing.router import Router

_STEPS_PER_LOOK = 256

_ARRIVES, _TELLS, _ENDS = range(3)
"""What happens at one time, in this order: a step that begins takes all that has come by then."""


class ReplicaRun(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one replica. Attributes: `busy_s`: in steps, and between them."""

    replica_id: str
    role: Role
    num_steps: int
    busy_s: float
    stats: EngineStats


class FleetRun(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a workload.

    Attributes:
        records: of the requests that were sent, by arrival.
        duration_s: from the start of the run to the last step, on the virtual clock.
    """

    records: list[RequestRecord]
    duration_s: float
    replicas: list[ReplicaRun]

    @property
    def num_steps(self) -> int:
        return sum(replica.num_steps for replica in self.replicas)

    @property
    def num_steps_over_budget(self) -> int:
        return sum(replica.stats.num_steps_over_budget for replica in self.replicas)

    @property
    def num_preemptions(self) -> int:
        return sum(replica.stats.num_preemptions for replica in self.replicas)


def simulate_fleet(
    fleet: SimulatedFleet,
    workload: Workload,
    on_progress: OnProgress | None = None,
    *,
    until_s: float = math.inf,
    stop_when: StopWhen | None = None,
) -> FleetRun:
    """Serve a workload, by a fleet that has just started. Args: as `simulate`'s.

    Raises:
        ConfigError: a request names a class that the server does not know, or is too long, or there
            is no such routing policy.
    """
    check_servable(fleet.server, workload)
    simulation = _FleetSimulation(fleet, workload)
    num_steps = 0
    while simulation.now_s < until_s and simulation.goes_on:
        num_steps += simulation.advance()
        if num_steps % _STEPS_PER_LOOK:
            continue
        clients = simulation.clients
        if on_progress is not None:
            on_progress(clients.counts)
        if stop_when is not None and stop_when(simulation.now_s, clients.records_as_sent()):
            break
    return simulation.result()


class _FleetSimulation:
    """Events by time; what is computed is that of the engines alone."""

    def __init__(self, fleet: SimulatedFleet, workload: Workload) -> None:
        self.now_s = 0.0
        # Requests come to the router, which has none of a replica's work to do for them.
        delivers = msgspec.structs.replace(fleet.server.delays, intake_s=0.0, intake_token_s=0.0)
        self.clients = SimulatedClients(workload, delivers)
        self._fleet = fleet
        self._delays = fleet.server.delays
        self._classes = fleet.server.scheduler.classes
        self._events: list[tuple[float, int, int, Callable[[], bool]]] = []  # a heap
        self._order = count()
        # Key a request that has not ended, value where it is; and those without a first token.
        self._placements: dict[str, Placement] = {}
        self._waiting: set[str] = set()
        self._router = Router(fleet.routing, fleet.server.scheduler.tenant_weights)
        knows_prefixes = any(request.hash_ids for request in workload)
        is_sharing = fleet.server.enable_prefix_caching and knows_prefixes
        self._follows_caches = is_sharing and self._router.asks_prefixes
        # Blocks come into the cache, whether anything else finds them there or not.
        is_sharing |= bool(fleet.split.prefill)
        token_bytes = fleet.kv_token_bytes or 0.0
        self._transfer_token_s = token_bytes / fleet.link.bytes_per_s
        self._handovers = Handovers(Traffic(fleet.link), token_bytes, self._deliver)
        self._replicas = [
            self._start(place, role, is_sharing) for place, role in enumerate(fleet.split.roles)
        ]
        self._by_id = {replica.replica_id: replica for replica in self._replicas}
        self._tell_all()

    @property
    def goes_on(self) -> bool:
        """Whether requests are to come, or have not ended."""
        return self.clients.next_arrival_s is not None or self.clients.counts["cancelled"] > 0

    def advance(self) -> bool:
        """Let the next thing happen; whether a step ended."""
        arrival_s = self.clients.next_arrival_s
        if arrival_s is not None and arrival_s <= self._events[0][0]:
            self.now_s = max(self.now_s, arrival_s)
            for message in self.clients.send(arrival_s):
                self._route(message)
            return False
        self.now_s, _, _, happen = heapq.heappop(self._events)
        return happen()

    def result(self) -> FleetRun:
        return FleetRun(
            records=self.clients.records(),
            duration_s=self.now_s,
            replicas=[
                ReplicaRun(
                    replica_id=replica.replica_id,
                    role=replica.role,
                    num_steps=replica.num_steps,
                    busy_s=replica.busy_s,
                    stats=replica.loop.stats,
                )
                for replica in self._replicas
            ],
        )

    def _start(self, place: int, role: Role, is_sharing: bool) -> SimulatedReplica:
        replica_id = f"{role}-{place}"
        transfer_token_s = self._transfer_token_s if role == "decode" else None
        self._router.join(replica_id, role, transfer_token_s=transfer_token_s)
        replica = SimulatedReplica(
            replica_id, role, self._fleet.server.sibling(place), is_sharing=is_sharing
        )
        if self._follows_caches:
            replica.kv.watch()
        return replica

    def _at(self, time_s: float, kind: int, happen: Callable[[], bool]) -> None:
        heapq.heappush(self._events, (time_s, kind, next(self._order), happen))

    def _route(self, message: AddRequest) -> None:
        placement = self._router.route(self._routed(message), self.now_s)
        self._placements[message.request_id] = placement
        self._waiting.add(message.request_id)
        at_s = self.now_s + self._delays.intake(self.clients.request(message.request_id))
        target = self._by_id[placement.decode]
        if placement.prefill is not None:
            source = self._by_id[placement.prefill]
            first, message = self._handovers.begin(message, source, target)
            self._deliver(source, first, at_s)
        self._deliver(target, message, at_s)

    def _routed(self, message: AddRequest) -> RoutedRequest:
        replica = self._replicas[0]
        hashes: Sequence[bytes] = ()
        if self._follows_caches:
            hashes = block_hashes(message.prompt_token_ids, replica.kv.block_size)
        return RoutedRequest(
            request_id=message.request_id,
            num_prompt_tokens=len(message.prompt_token_ids),
            slo=self._classes[message.service.slo_class],
            tenant=message.service.tenant,
            block_hashes=hashes,
            block_size=replica.kv.block_size,
        )

    def _deliver(self, replica: SimulatedReplica, event: Event, at_s: float) -> None:
        def arrives() -> bool:
            replica.deliver(event)
            if replica.ends_s is None:
                self._begin_after_others(replica)
            return False

        self._at(at_s, _ARRIVES, arrives)

    def _begin_after_others(self, replica: SimulatedReplica) -> None:
        """Begin a step, once all has come that comes now."""

        def begins() -> bool:
            if replica.ends_s is None and replica.has_work:
                self._begin(replica)
            return False

        self._at(self.now_s, _ENDS, begins)

    def _begin(self, replica: SimulatedReplica) -> None:
        outputs = replica.begin(self.now_s)
        self._handovers.note_begun(replica, self.now_s)
        has_step = not replica.is_stalled
        assert replica.ends_s is not None

        def ends() -> bool:
            replica.ends_s = None
            self._land(replica, outputs)
            if replica.has_work:
                self._begin_after_others(replica)
            return has_step

        self._at(replica.ends_s, _ENDS, ends)

    def _land(self, replica: SimulatedReplica, outputs: Sequence[RequestOutput]) -> None:
        """Pass on what a step brought."""
        self._handovers.note_landed(replica, self.now_s)
        for_clients = [output for output in outputs if self._is_for_client(replica, output)]
        for output in for_clients:
            if output.new_token_ids and output.request_id in self._waiting:
                self._waiting.discard(output.request_id)
                self._router.note_first_token(output.request_id, self.now_s)
            if output.finish_reason is not None:
                self._end(replica, output)
        self.clients.receive(for_clients, self.now_s)
        if self._follows_caches:
            self._router.note_kv_events(replica.replica_id, replica.kv.take_events())
        if replica.replica_id in self._untold:
            self._tell(replica)

    def _is_for_client(self, replica: SimulatedReplica, output: RequestOutput) -> bool:
        """Not what has ended, nor what a replica says that only computes the prompt."""
        request_id = output.request_id
        if request_id not in self._placements:
            return False
        if replica.role != "prefill" or output.finish_reason is FinishReason.REFUSED:
            return True
        self._router.note_prefilled(request_id, self.now_s)
        return False

    def _end(self, replica: SimulatedReplica, output: RequestOutput) -> None:
        request_id = output.request_id
        placement = self._placements.pop(request_id)
        self._waiting.discard(request_id)
        is_served = output.finish_reason is FinishReason.LENGTH
        num_tokens = self.clients.request(request_id).num_output_tokens if is_served else 0
        self._router.note_end(request_id, num_tokens, self.now_s)
        if placement.prefill is None or is_served:
            return
        # One of the two has refused it: the other one is to forget it.
        is_first = replica.role == "prefill"
        other = self._by_id[placement.decode if is_first else placement.prefill]
        arrived = self._handovers.give_up(request_id)
        self._deliver(other, AbortRequest(request_id=request_id), self.now_s)
        if arrived is not None:
            self._deliver(other, arrived, self.now_s)

    def _tell_all(self) -> None:
        """Have each replica tell of itself, now or as soon as its step has ended."""
        self._untold = {replica.replica_id for replica in self._replicas}
        for replica in self._replicas:
            if replica.ends_s is None:
                self._tell(replica)

        def tells() -> bool:
            if not self._events and self.clients.next_arrival_s is None:
                raise RuntimeError(f"at {self.now_s} s there are requests, but nothing happens")
            self._tell_all()
            return False

        self._at(self.now_s + self._fleet.state_every_s, _TELLS, tells)

    def _tell(self, replica: SimulatedReplica) -> None:
        self._untold.discard(replica.replica_id)
        self._router.note_state(replica.replica_id, replica.loop.state, self.now_s)
