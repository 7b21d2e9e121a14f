"""Replicas as a deployment of Ray Serve, and how front doors reach them."""

from collections.abc import AsyncGenerator
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from legato.core.config import EngineConfig
from legato.engine.process.channel import pack, unpacker
from legato_fleet.autoscaling import STRAIN, keep_promises, strain
from legato_fleet.config import FleetConfig, Pool, replica_config, simulated_program
from legato_fleet.exposure import check_reach, open_on_this_node
from legato_fleet.replica import Replica
from legato_fleet.replicas import Line
from legato_fleet.request_router import FleetRequestRouter
from legato_fleet.routing.request import Role

POOL_NAMES: dict[Role, str] = {"both": "replicas", "prefill": "prefill", "decode": "decode"}
"""The name of a pool's deployment."""

_MOST_ONGOING = 100_000
"""Calls per replica: no bound here, since each engine has its own."""
_DRAIN_S = 3600.0
"""The longest time that a replica may take to finish its requests before it is ended."""
_LOOK_EVERY_S = 0.5


class ReplicaDeployment:
    """Ray's side of a `Replica`.

    Args:
        config: an `EngineConfig`, packed.
        simulate: as of `FleetConfig`.
        role: the part of each request that it computes.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, config: bytes, simulate: str | None, role: Role
    ) -> None:
        check_reach()
        open_on_this_node()
        replica_id = serve.get_replica_context().replica_id.unique_id
        host = ray.util.get_node_ip_address()
        engine_config = replica_config(unpacker(EngineConfig).decode(config), role, host)
        self._role: Role = role
        program = None if simulate is None else simulated_program(simulate)
        self._replica = await Replica.start(replica_id, engine_config, program=program)

    async def attach(self, door_id: str) -> AsyncGenerator[bytes]:
        """See `Replica.attach`."""
        async for frame in self._replica.attach(door_id):
            yield frame

    async def take(self, replica_id: str, door_id: str, frame: bytes) -> None:
        """See `Replica.take`. Args: replica_id: this one's."""
        assert replica_id == self._replica.replica_id
        self._replica.take(door_id, frame)

    async def check_health(self) -> None:
        """Called by Ray at intervals; if it raises, Ray starts another replica."""
        self._replica.check_running()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray at intervals, for `keep_promises`."""
        state = self._replica.state
        if state is None:
            return {}
        return {STRAIN: strain(state, self._replica.classes.values(), self._role)}

    async def __del__(self) -> None:
        await self._replica.close()


def replicas_app(config: EngineConfig, fleet: FleetConfig, pool: Pool) -> Application:
    """Make the deployment of a pool, to be run or bound to others."""
    options: dict[str, Any] = {"num_replicas": pool.fewest}
    if pool.most > pool.fewest:
        options = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=pool.fewest,
                initial_replicas=pool.fewest,
                max_replicas=pool.most,
                upscale_delay_s=fleet.upscale_delay_s,
                downscale_delay_s=fleet.downscale_delay_s,
                policy=AutoscalingPolicy(policy_function=keep_promises),
            )
        }
    deployment = serve.deployment(
        ReplicaDeployment,
        name=POOL_NAMES[pool.role],
        max_ongoing_requests=_MOST_ONGOING,
        graceful_shutdown_wait_loop_s=_LOOK_EVERY_S,
        graceful_shutdown_timeout_s=_DRAIN_S,
        ray_actor_options={"num_cpus": fleet.replica_cpus, "num_gpus": fleet.replica_gpus},
        request_router_config=RequestRouterConfig(request_router_class=FleetRequestRouter),
        **options,
    )
    return deployment.bind(pack(config), fleet.simulate, pool.role)


class RayReplicas:
    """`Replicas` that Ray Serve runs.

    Args:
        handle: of their deployment.
    """

    death = ""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._take = handle.options(method_name="take")
        self._attach = handle.options(method_name="attach", stream=True)

    async def attach(self, line: Line) -> AsyncGenerator[bytes]:
        """See `Replicas.attach`."""
        frames = self._attach.remote(line)
        try:
            async for frame in frames:
                yield frame
        finally:
            frames.cancel()

    async def send(self, replica_id: str, door_id: str, frame: bytes) -> None:
        """See `Replicas.send`."""
        response = self._take.remote(replica_id, door_id, frame)
        try:
            await response
        except BaseException:
            response.cancel()  # Ray would wait for a lost replica
            raise

    async def close(self) -> None:
        """Leave the replicas running; the caller that started them ends them."""
