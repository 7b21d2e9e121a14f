"""The event loop of a simulated fleet."""

import heapq
import random
from collections.abc import Callable, Sequence
from itertools import count

import msgspec

from legato.core.block_hash import block_hashes
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AbortRequest, AddRequest, Event
from legato_fleet.routing.request import Placement, Role, RoutedRequest
from legato_fleet.routing.router import NoReplicaError, Router
from legato_fleet.routing.scaling import strain
from legato_lab.simulation.clients import SimulatedClients
from legato_lab.simulation.fleet import SimulatedFleet
from legato_lab.simulation.handover import SimulatedHandovers
from legato_lab.simulation.link import LinkTraffic
from legato_lab.simulation.replica import ReplicaRun, SimulatedReplica
from legato_lab.simulation.scaler import Scaler
from legato_lab.simulation.tally import Tally
from legato_lab.simulation.workload import Workload

_ARRIVES, _TELLS, _ENDS = range(3)
"""The order of events at one time: a step that begins takes all events that have come by then."""

_DEAD = "the replica died while it held this request"


class FleetSimulation:
    """Simulates a fleet by events in order of time; only the engines compute.

    Args:
        tally: as of `SimulatedClients`.

    Attributes:
        num_tried_again, num_reruns, num_lost: as in `FleetRun`.
    """

    def __init__(self, fleet: SimulatedFleet, workload: Workload, tally: Tally | None) -> None:
        self.now_s = 0.0
        # No intake here: requests come to the router first, and replicas take them in later.
        delivers = msgspec.structs.replace(fleet.server.delays, intake_s=0.0, intake_token_s=0.0)
        self.clients = SimulatedClients(workload, delivers, tally, max_retries=fleet.max_retries)
        self.num_tried_again = self.num_reruns = self.num_lost = 0
        self._fleet = fleet
        self._delays = fleet.server.delays
        self._classes = fleet.server.scheduler.classes
        self._random = random.Random(fleet.seed)
        self._events: list[tuple[float, int, int, Callable[[], bool]]] = []  # a heap
        self._order = count()
        # By the id of a request that has not ended: its placement, the replicas that refused it and
        # when to try them again, whether it has no token yet; then the requests that no replica
        # could take.
        self._placements: dict[str, Placement] = {}
        self._refusals: dict[str, dict[str, float]] = {}
        self._waiting: set[str] = set()
        self._unplaced: list[AddRequest] = []
        self._router = Router(
            fleet.routing,
            fleet.server.scheduler.tenant_weights,
            state_every_s=fleet.state_every_s,
        )
        knows_prefixes = any(request.hash_ids for request in workload)
        is_sharing = fleet.server.enable_prefix_caching and knows_prefixes
        self._follows_caches = is_sharing and self._router.asks_prefixes
        # Handed-over blocks enter the cache even if requests share no prefixes.
        self._is_sharing = is_sharing or bool(fleet.split.prefill)
        token_bytes = fleet.kv_token_bytes or 0.0
        self._transfer_token_s = token_bytes / fleet.link.bytes_per_s
        self._handovers = SimulatedHandovers(LinkTraffic(fleet.link), token_bytes, self._deliver)
        self._num_started = 0
        self._num_starting = 0
        self._replicas: dict[str, SimulatedReplica] = {}  # key: replica id
        self._gone: list[ReplicaRun] = []
        # Key: id of a hanging replica; value: the ends of its delayed steps.
        self._held: dict[str, list[Callable[[], bool]]] = {}
        self._draining: set[str] = set()  # replica ids
        self._scaler: Scaler | None = None
        if fleet.max_replicas is not None:
            self._scaler = Scaler(len(fleet.split), fleet.max_replicas)
        for role in fleet.split.roles:
            self._start(role)
        self._block_size = next(iter(self._replicas.values())).kv.block_size
        self._tell_all()

    @property
    def goes_on(self) -> bool:
        """Whether requests are yet to come or to end."""
        return self.clients.next_arrival_s is not None or self.clients.counts["cancelled"] > 0

    def advance(self) -> bool:
        """Process the next event; return whether a step ended."""
        arrival_s = self.clients.next_arrival_s
        if arrival_s is not None and arrival_s <= self._events[0][0]:
            self.now_s = max(self.now_s, arrival_s)
            for message in self.clients.send(arrival_s):
                self._route(message)
            return False
        self.now_s, _, _, happen = heapq.heappop(self._events)
        return happen()

    def replica_runs(self) -> list[ReplicaRun]:
        """Return the runs of all past and present replicas, in the order of their starts."""
        runs = [*self._gone, *(one.run(self.now_s) for one in self._replicas.values())]
        return sorted(runs, key=lambda run: run.started_s)

    def _at(self, time_s: float, kind: int, happen: Callable[[], bool]) -> None:
        heapq.heappush(self._events, (time_s, kind, next(self._order), happen))

    # Replicas come and go.

    def _start(self, role: Role) -> SimulatedReplica:
        place, self._num_started = self._num_started, self._num_started + 1
        replica_id = f"{role}-{place}"
        transfer_token_s = self._transfer_token_s if role == "decode" else None
        self._router.join(replica_id, role, transfer_token_s=transfer_token_s)
        server = self._fleet.server_of(role).sibling(place)
        replica = self._replicas[replica_id] = SimulatedReplica(
            replica_id, role, server, started_s=self.now_s, is_sharing=self._is_sharing
        )
        if self._follows_caches:
            replica.kv.watch()
        if self._fleet.mtbf_s is not None:
            dies_s = self.now_s + self._random.expovariate(1.0 / self._fleet.mtbf_s)
            self._at(dies_s, _TELLS, lambda: self._die(replica))
        hang = self._fleet.hang
        if hang is not None and hang.place == place:
            self._at(hang.from_s, _TELLS, lambda: self._set_hung(replica, is_hung=True))
            self._at(hang.until_s, _TELLS, lambda: self._set_hung(replica, is_hung=False))
        return replica

    def _set_hung(self, replica: SimulatedReplica, *, is_hung: bool) -> bool:
        replica.is_hung = is_hung
        if not is_hung and not replica.is_gone:
            for happen in self._held.pop(replica.replica_id, ()):
                self._at(self.now_s, _ENDS, happen)
            if replica.ends_s is None:
                self._begin_after_others(replica)
        return False

    def _start_later(self, role: Role) -> None:
        def serves() -> bool:
            self._num_starting -= 1
            self._tell(self._start(role))
            return False

        self._num_starting += 1
        self._at(self.now_s + self._fleet.start_s, _TELLS, serves)

    def _die(self, replica: SimulatedReplica) -> bool:
        if replica.is_gone:
            return False
        is_wanted = replica.replica_id not in self._draining
        left = self._leave(replica, is_lost=True)
        if is_wanted:
            self._start_later(replica.role)
        self._handovers.lose(replica, self.now_s)
        for request_id in left:
            self._lose(replica, request_id)
        return False

    def _leave(self, replica: SimulatedReplica, *, is_lost: bool) -> list[str]:
        """Remove a replica; return the requests that it had."""
        replica.is_gone = True
        del self._replicas[replica.replica_id]
        self._draining.discard(replica.replica_id)
        self._untold.discard(replica.replica_id)
        self._gone.append(replica.run(self.now_s, is_lost=is_lost))
        left = self._router.leave(replica.replica_id, self.now_s)
        return [*left.waiting, *left.begun]

    def _lose(self, replica: SimulatedReplica, request_id: str) -> None:
        """Rerun a request elsewhere, once, if it has no token; otherwise end it with an error."""
        placement = self._placements.pop(request_id)
        self._refusals.pop(request_id, None)
        has_begun = request_id not in self._waiting
        self._waiting.discard(request_id)
        self._forget_elsewhere(replica, placement, request_id)
        again = None if has_begun else self.clients.begin_again(request_id)
        if again is not None:
            self.num_reruns += 1
            self._route(again)
            return
        self.num_lost += 1
        lost = RequestOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=_DEAD)
        self.clients.receive([lost], self.now_s)

    def _scale(self, scaler: Scaler) -> None:
        views = self._router.replicas
        serving = [one for one in self._replicas if one not in self._draining]
        states = [state for one in serving if (state := views[one].state) is not None]
        if self._num_starting or len(states) < len(serving) or not serving:
            return  # new replicas have reported nothing yet
        classes = self._classes.values()
        wanted = scaler.wanted([strain(state, classes) for state in states], self.now_s)
        for _ in range(wanted - len(serving)):
            self._start_later("both")
        spare = max(0, len(serving) - wanted)
        for replica_id in sorted(serving, key=lambda one: views[one].num_in_flight)[:spare]:
            self._router.drain(replica_id)
            self._draining.add(replica_id)

    # Requests go to replicas.

    def _route(self, message: AddRequest) -> None:
        try:
            placement = self._router.route(
                self._routed(message),
                self.now_s,
                without=self._refusals.get(message.request_id, ()),
            )
        except NoReplicaError:
            self._unplaced.append(message)
            return
        self._placements[message.request_id] = placement
        self._waiting.add(message.request_id)
        at_s = self.now_s + self._delays.intake(self.clients.request(message.request_id))
        target = self._replicas[placement.decode]
        target.num_requests += 1
        if placement.prefill is not None:
            source = self._replicas[placement.prefill]
            source.num_requests += 1
            first, message = self._handovers.begin(message, source, target)
            self._deliver(source, first, at_s)
        self._deliver(target, message, at_s)

    def _place_waiting(self) -> None:
        """Send the requests that no replica could take so far."""
        unplaced, self._unplaced = self._unplaced, []
        for message in unplaced:
            self._route(message)

    def _rescue(self) -> None:
        """Rerun elsewhere, once, requests that wait at replicas that have stopped reporting."""
        for request_id in self._router.stranded(self.now_s):
            again = self.clients.begin_again(request_id)
            if again is None:
                continue
            placement = self._placements.pop(request_id)
            self._refusals.pop(request_id, None)
            self._waiting.discard(request_id)
            self._router.note_end(request_id, 0, self.now_s)
            replica = self._replicas[placement.decode]
            self._deliver(replica, AbortRequest(request_id=request_id), self.now_s)
            self._forget_elsewhere(replica, placement, request_id)
            self.num_reruns += 1
            self._route(again)

    def _routed(self, message: AddRequest) -> RoutedRequest:
        hashes: Sequence[bytes] = ()
        if self._follows_caches:
            hashes = block_hashes(message.prompt_token_ids, self._block_size)
        return RoutedRequest(
            request_id=message.request_id,
            num_prompt_tokens=len(message.prompt_token_ids),
            slo=self._classes[message.service.slo_class],
            tenant=message.service.tenant,
            block_hashes=hashes,
            block_size=self._block_size,
        )

    def _deliver(self, replica: SimulatedReplica, event: Event, at_s: float) -> None:
        def arrives() -> bool:
            if not replica.is_gone:
                replica.deliver(event)
                if replica.ends_s is None:
                    self._begin_after_others(replica)
            return False

        self._at(at_s, _ARRIVES, arrives)

    # Steps begin and end.

    def _begin_after_others(self, replica: SimulatedReplica) -> None:
        """Begin a step after all other events of this time."""

        def begins() -> bool:
            is_free = replica.ends_s is None and not replica.is_hung
            if is_free and replica.has_work and not replica.is_gone:
                self._begin(replica)
            return False

        self._at(self.now_s, _ENDS, begins)

    def _begin(self, replica: SimulatedReplica) -> None:
        outputs = replica.begin(self.now_s)
        self._handovers.note_begun(replica, self.now_s)
        has_step = not replica.is_stalled
        assert replica.ends_s is not None

        def ends() -> bool:
            if replica.is_gone:
                return False
            if replica.is_hung:
                self._held.setdefault(replica.replica_id, []).append(ends)
                return False
            replica.ends_s = None
            self._land(replica, outputs)
            if replica.has_work:
                self._begin_after_others(replica)
            return has_step

        self._at(replica.ends_s, _ENDS, ends)

    def _land(self, replica: SimulatedReplica, outputs: Sequence[RequestOutput]) -> None:
        """Deliver the outputs of a step."""
        self._handovers.note_landed(replica, self.now_s)
        placements, waiting = self._placements, self._waiting
        # Outputs of requests that have not ended.
        outputs = [output for output in outputs if output.request_id in placements]
        if replica.role == "prefill":
            outputs = self._note_prefilled(outputs)
        if any(output.finish_reason is FinishReason.REFUSED for output in outputs):
            finals = [self._final(replica, output) for output in outputs]
            outputs = [output for output in finals if output is not None]
        for output in outputs:
            if output.request_id in waiting and output.new_token_ids:
                waiting.discard(output.request_id)
                self._router.note_first_token(output.request_id, self.now_s)
            if output.finish_reason is not None:
                self._end(replica, output)
        self.clients.receive(outputs, self.now_s)
        if self._follows_caches:
            self._router.note_kv_events(replica.replica_id, replica.kv.take_events())
        if replica.replica_id in self._untold:
            self._tell(replica)

    def _note_prefilled(self, outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
        """Note prefills that have ended; return the outputs for clients, which are refusals."""
        for output in outputs:
            if output.finish_reason is not FinishReason.REFUSED:
                self._router.note_prefilled(output.request_id, self.now_s)
        return [output for output in outputs if output.finish_reason is FinishReason.REFUSED]

    def _final(self, replica: SimulatedReplica, output: RequestOutput) -> RequestOutput | None:
        """Return a replica's final output; None if another replica may take the refused request.

        If there are two pools, a refusal is final: other replicas are not tried in this simulation.
        """
        request_id = output.request_id
        is_refused = output.finish_reason is FinishReason.REFUSED
        if not is_refused or self._placements[request_id].prefill is not None:
            return output
        refusals = self._refusals.setdefault(request_id, {})
        refusals[replica.replica_id] = output.retry_after_s or 0.0
        if not self._router.may_try_again(refusals, replica.role, self.now_s):
            return msgspec.structs.replace(output, retry_after_s=min(refusals.values()))
        self.num_tried_again += 1
        del self._placements[request_id]
        self._router.note_end(request_id, 0, self.now_s)
        self._route(self.clients.message(request_id))
        return None

    def _end(self, replica: SimulatedReplica, output: RequestOutput) -> None:
        request_id = output.request_id
        placement = self._placements.pop(request_id)
        self._refusals.pop(request_id, None)
        self._waiting.discard(request_id)
        is_served = output.finish_reason is FinishReason.LENGTH
        num_tokens = self.clients.request(request_id).num_output_tokens if is_served else 0
        self._router.note_end(request_id, num_tokens, self.now_s)
        if not is_served:
            self._forget_elsewhere(replica, placement, request_id)

    def _forget_elsewhere(
        self, replica: SimulatedReplica, placement: Placement, request_id: str
    ) -> None:
        """Have the other of two replicas drop a request that this one refused, or died with."""
        self._handovers.give_up(request_id, self.now_s)
        for replica_id in {placement.prefill, placement.decode} - {replica.replica_id, None}:
            other = self._replicas.get(replica_id or "")
            if other is not None:
                self._deliver(other, AbortRequest(request_id=request_id), self.now_s)

    # Replicas report their states.

    def _tell_all(self) -> None:
        """Have each replica report, now or at the end of its step."""
        self._untold = set(self._replicas)
        for replica in [*self._replicas.values()]:
            if replica.ends_s is None and not replica.is_hung:
                self._tell(replica)

        def tells() -> bool:
            if not self._events and self.clients.next_arrival_s is None:
                raise RuntimeError(f"at {self.now_s} s there are requests, but nothing happens")
            if self._scaler is not None:
                self._scale(self._scaler)
            self._tell_all()
            self._rescue()
            return False

        self._at(self.now_s + self._fleet.state_every_s, _TELLS, tells)

    def _tell(self, replica: SimulatedReplica) -> None:
        self._untold.discard(replica.replica_id)
        view = self._router.replicas[replica.replica_id]
        if replica.replica_id in self._draining and not view.num_in_flight:
            self._leave(replica, is_lost=False)
        else:
            state = replica.loop.state
            assert state is not None, "the scheduler erred: see the log"
            self._router.note_state(replica.replica_id, state, self.now_s)
            self._place_waiting()
