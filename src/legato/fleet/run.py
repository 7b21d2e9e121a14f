"""`legato fleet`: replicas on Ray Serve, and a server in front of them in this process."""

import contextlib
import logging
from collections.abc import Awaitable, Iterator
from functools import partial
from importlib.util import find_spec

from legato.core.addresses import is_loopback
from legato.core.config import EngineConfig
from legato.core.errors import ConfigError
from legato.engine.frontend.engine import Engine
from legato.fleet.config import FleetConfig
from legato.fleet.engine import FleetEngine
from legato.fleet.exposure import check_reach, keep_to_this_machine
from legato.fleet.replicas import Replicas
from legato.model.defaults import ModelDefaults
from legato.model.vocabulary import Vocabulary
from legato.server.config import ServerConfig
from legato.server.run import Announce, serve

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
        ConfigError: as `serve`; or Ray is missing, or has no room for the replicas, or what is
            asked for is one engine's.
    """
    check_ray()
    if config.kv_events_endpoint is not None:
        raise ConfigError(
            "kv_events_endpoint is one engine's, for routers in front of several: a fleet follows "
            "its replicas' caches itself"
        )
    with running_replicas(engine_config, fleet) as replicas:
        start = partial(_start, engine_config, config, fleet, replicas)
        return serve(engine_config, config, on_ready=on_ready, start_engine=start)


def check_ray() -> None:
    """Raises `ConfigError` where Ray Serve is not installed."""
    if find_spec("ray") is None:
        raise ConfigError("a fleet needs Ray Serve: install legato[fleet]")


@contextlib.contextmanager
def running_replicas(engine_config: EngineConfig, fleet: FleetConfig) -> Iterator[Replicas]:
    """The replicas, once all of them serve; what was started for them is ended.

    Raises:
        ConfigError: they cannot be started.
    """
    is_ours = fleet.ray_address is None
    if is_ours:
        keep_to_this_machine()
    import ray
    from ray import serve as ray_serve

    from legato.fleet.deployment import RayReplicas, replicas_app

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
        else:
            ending.callback(ray_serve.delete, _APP)
        try:
            handle = ray_serve.run(replicas_app(engine_config, fleet), name=_APP, route_prefix=None)
        except RuntimeError as error:
            raise ConfigError(f"the replicas cannot be started: {error}") from error
        yield RayReplicas(handle)


async def _start(
    engine_config: EngineConfig,
    config: ServerConfig,
    fleet: FleetConfig,
    replicas: Replicas,
    text: Awaitable[tuple[Vocabulary, ModelDefaults]],
) -> Engine:
    return await FleetEngine.start(
        engine_config,
        replicas,
        text,
        served_model_names=config.served_model_names,
        routing=fleet.routing,
        is_only_door=True,
    )
