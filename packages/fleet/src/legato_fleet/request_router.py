"""Delivers a front door's messages through Ray Serve.

`legato_fleet.routing` has already chosen the replica of each request: that needs the prompt's
tokens and the replicas' reports of each step. This router finds the replica that a message is
addressed to, and replicas that a front door has not joined yet.
"""

from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)

from legato_fleet.replicas import Line


class FleetRequestRouter(RequestRouter):
    """Routes a call by its first argument: a `Line`, or a replica's id."""

    def initialize_state(self, **kwargs: Any) -> None:  # noqa: ARG002
        """Each process that calls the replicas has one router."""
        self._lines: dict[str, tuple[Line, str]] = {}
        """Key replica id, value its line and the id of Ray's request."""

    @property
    def supports_rejection_protocol(self) -> bool:
        """Replicas refuse requests in their own messages."""
        return False

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replica for a call; none if there is none yet, and Ray asks again."""
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
        """Note the replica that a line was routed to."""
        line = pending_request.args[0]
        if isinstance(line, Line):
            request_id = pending_request.metadata.internal_request_id
            self._lines[replica_id.unique_id] = line, request_id

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """If a line has ended, its replica may be joined again."""
        known = self._lines.get(replica_id.unique_id)
        if known is not None and known[1] == internal_request_id:
            del self._lines[replica_id.unique_id]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """End the lines of replicas that are no longer listed."""
        super().update_replicas(replicas)
        listed = {replica.replica_id.unique_id for replica in replicas}
        for replica_id in self._lines.keys() - listed:
            line, _ = self._lines.pop(replica_id)
            line.end()
