"""The server in front of the replicas, as a deployment: `serve run legato.fleet:app`.

Ray Serve's proxies hold the connections.
"""

import time
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from legato.api.app import create_app
from legato.api.bodies.body_model import Serving
from legato.api.config import ServerConfig
from legato.api.http.middleware import REQUEST_ID, Lifecycle
from legato.api.http.outlet import AsgiOutlet
from legato.api.http_server import begin_tracing, metrics_of
from legato.api.readers.reader_pool import TextProcesses
from legato.checkpoint.source import configured_source
from legato.core.config import EngineConfig
from legato.engine.process.channel import pack, unpacker
from legato.language.tokenizer.loading import text_source
from legato_fleet.config import check_fleet, fleet_settings
from legato_fleet.deployment import RayReplicas, replicas_app
from legato_fleet.engine import FleetEngine
from legato_fleet.exposure import check_reach, open_on_this_node

_MOST_ONGOING = 100_000
_DRAIN_S = 3600.0


class BehindProxy:
    """The application behind another server.

    Ray's proxy gives each request an id, in a header of the request and of the answer. No client
    counts as local, even if the proxy says so: admins need a key.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for done in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{done}.complete"})
            return
        scope["client"] = None
        scope.setdefault("state", {})["received_s"] = time.monotonic()
        outlet = AsgiOutlet(_without_id(send))
        outlet.put_into(scope)
        await self._app(scope, receive, outlet.send)


def _without_id(send: Send) -> Send:
    async def send_without_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            del MutableHeaders(scope=message)[REQUEST_ID]
        await send(message)

    return send_without_id


@serve.ingress()
class FrontDoor:
    """Args: config, server: an `EngineConfig` and a `ServerConfig`, packed."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, config: bytes, server: bytes, routing: str, *pools: DeploymentHandle
    ) -> None:
        check_reach()
        open_on_this_node()
        engine_config = unpacker(EngineConfig).decode(config)
        server_config = unpacker(ServerConfig).decode(server)
        source = configured_source(engine_config.model)
        self._text = TextProcesses(
            text_source(engine_config.model, source), server_config.timeout_prompt_s
        )
        self._engine = await FleetEngine.start(
            engine_config,
            [RayReplicas(replicas) for replicas in pools],
            self._text.loaded(),
            served_model_names=server_config.served_model_names,
            routing=routing,
            is_only_door=False,
        )
        await self._text.serve(
            Serving(
                info=self._engine.info,
                max_completions=server_config.max_completions,
                trust_request_chat_template=server_config.trust_request_chat_template,
                message_special_tokens=server_config.message_special_tokens,
                unknown_fields=server_config.unknown_fields,
                shows_template=server_config.enable_tokenizer_info_endpoint,
            )
        )
        metrics = metrics_of(self._engine, self._text, server_config)
        self._tracing = begin_tracing(self._engine, server_config)
        app = create_app(self._engine, self._text, server_config, Lifecycle(), metrics)
        self._behind_proxy = BehindProxy(app)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._behind_proxy

    async def check_health(self) -> None:
        """Called by Ray at intervals; if it raises, Ray starts another front door."""
        if not self._engine.is_alive:
            raise RuntimeError(self._engine.death)

    async def __del__(self) -> None:
        """Leave the replicas, which otherwise would wait for this front door before they end."""
        for part in self._tracing:
            await part.stop()
        await self._engine.close()
        await self._text.close()


def app(settings: dict[str, Any]) -> Application:
    """Build the application that `serve run legato.fleet:app` runs.

    Args:
        settings: `name=value` for fields of the engine's, the server's and the fleet's settings,
            with underscores, such as `replicas=4`; `api_key_file` and `admin_api_key_file` are
            paths of files with one key a line.

    Raises:
        ConfigError: as `fleet_settings`.
    """
    config, server, fleet = fleet_settings(settings)
    check_fleet(config, fleet, is_on_cluster=True)
    deployment = serve.deployment(
        FrontDoor,
        name="front-door",
        max_ongoing_requests=_MOST_ONGOING,
        graceful_shutdown_timeout_s=_DRAIN_S,
        max_surge_percent=100,  # start a new one before the old one ends
    )
    pools = [replicas_app(config, fleet, pool) for pool in fleet.pools]
    return deployment.bind(pack(config), pack(server), fleet.routing, *pools)
