"""How Ray Serve passes on what a front door sends.

Which replica serves which request has been decided by then (`legato.routing`): that takes the
prompt's tokens, and what replicas tell of each step. Here a message finds the replica that it is
for, and a front door those that it does not know yet.
"""

from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)

from legato.fleet.replicas import Line


class FleetRequestRouter(RequestRouter):
    """The first argument of a call says to whom it goes: a `Line`, or a replica's id."""

    def initialize_state(self, **kwargs: Any) -> None:  # noqa: ARG002
        """There is one for each process that calls the replicas."""
        self._lines: dict[str, tuple[Line, str]] = {}
        """Key replica id, value what leads there and the id of Ray's request."""

    @property
    def supports_rejection_protocol(self) -> bool:
        """Replicas refuse requests in words of their own."""
        return False

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One, or none as long as there is none to be had: Ray then asks again."""
        if pending_request is None:
            return []
        pending_request.routing_context.should_backoff = True
        wanted = pending_request.args[0]
        for replica in candidate_replicas:
            replica_id = replica.replica_id.unique_id
            is_wanted = (
                replica_id not in self._lines if isinstance(wanted, Line) else replica_id == wanted
            )
            if is_wanted:
                return [[replica]]
        return []

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ReplicaID,
        result: ReplicaResult,  # noqa: ARG002
    ) -> None:
        """A line leads somewhere now."""
        line = pending_request.args[0]
        if isinstance(line, Line):
            request_id = pending_request.metadata.internal_request_id
            self._lines[replica_id.unique_id] = line, request_id

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Where that was a line, the replica may be joined again."""
        known = self._lines.get(replica_id.unique_id)
        if known is not None and known[1] == internal_request_id:
            del self._lines[replica_id.unique_id]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Lines to replicas that are not listed any more are to end."""
        super().update_replicas(replicas)
        listed = {replica.replica_id.unique_id for replica in replicas}
        for replica_id in self._lines.keys() - listed:
            line, _ = self._lines.pop(replica_id)
            line.end()
