"""`legato fleet`: replicas on Ray Serve, and a server in front of them in this process."""

import contextlib
import logging
from collections.abc import Awaitable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec

from legato.api.config import ServerConfig
from legato.api.run import Announce, serve
from legato.checkpoint.defaults import ModelDefaults
from legato.core.addresses import is_loopback
from legato.core.config import EngineConfig
from legato.core.errors import ConfigError
from legato.core.vocabulary import Vocabulary
from legato.engine.client.engine import Engine
from legato_fleet.config import FleetConfig, check_fleet
from legato_fleet.engine import FleetEngine
from legato_fleet.exposure import check_reach, keep_to_this_machine
from legato_fleet.replicas import Replicas

logger = logging.getLogger(__name__)

_APP = "legato"


def serve_fleet(
    engine_config: EngineConfig,
    config: ServerConfig,
    fleet: FleetConfig,
    *,
    on_ready: Announce,
) -> int:
    """Start the replicas, and serve them as one until a signal comes; otherwise as `serve`.

    Raises:
        ConfigError: as `serve` and `check_fleet`; or Ray is missing, or has no room for replicas,
            or a setting applies only to a single engine.
    """
    check_ray()
    if config.kv_events_endpoint is not None:
        raise ConfigError(
            "kv_events_endpoint is one engine's, for routers in front of several: a fleet follows "
            "its replicas' caches itself"
        )
    check_fleet(engine_config, fleet, is_on_cluster=fleet.ray_address is not None)
    with running_replicas(engine_config, fleet) as pools:
        start = partial(_start, engine_config, config, fleet, pools)
        return serve(engine_config, config, on_ready=on_ready, start_engine=start)


def check_ray() -> None:
    """Raises `ConfigError` if Ray Serve is not installed."""
    if find_spec("ray") is None:
        raise ConfigError("a fleet needs Ray Serve: install legato-llm[fleet]")


@contextlib.contextmanager
def running_replicas(engine_config: EngineConfig, fleet: FleetConfig) -> Iterator[list[Replicas]]:
    """Start the replicas of each pool, and wait until they serve; end them on leaving.

    Raises:
        ConfigError: they cannot be started.
    """
    is_ours = fleet.ray_address is None
    if is_ours:
        keep_to_this_machine()
    import ray
    from ray import serve as ray_serve

    from legato_fleet.deployment import POOL_NAMES, RayReplicas, replicas_app

    with contextlib.ExitStack() as ending:
        if is_ours:
            ray.init(include_dashboard=False, log_to_driver=False)
            ending.callback(ray.shutdown)
            assert is_loopback(ray.util.get_node_ip_address()), "Ray was imported too early"
        else:
            ray.init(address=fleet.ray_address, log_to_driver=False)
            ending.callback(ray.shutdown)
            check_reach()
        ray_serve.start(proxy_location="Disabled")
        if is_ours:
            ending.callback(ray_serve.shutdown)
        apps = [
            ray_serve.RunTarget(
                replicas_app(engine_config, fleet, pool),
                name=f"{_APP}-{POOL_NAMES[pool.role]}",
                route_prefix=None,
            )
            for pool in fleet.pools
        ]
        if not is_ours:
            for app in apps:
                ending.callback(ray_serve.delete, app.name)
        try:
            handles = ray_serve.run_many(apps)
        except RuntimeError as error:
            raise ConfigError(f"the replicas cannot be started: {error}") from error
        yield [RayReplicas(handle) for handle in handles]


async def _start(
    engine_config: EngineConfig,
    config: ServerConfig,
    fleet: FleetConfig,
    pools: Sequence[Replicas],
    text: Awaitable[tuple[Vocabulary, ModelDefaults]],
) -> Engine:
    return await FleetEngine.start(
        engine_config,
        pools,
        text,
        served_model_names=config.served_model_names,
        routing=fleet.routing,
        is_only_door=True,
    )
