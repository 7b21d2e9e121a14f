"""Settings of a fleet, and how deployment files give them."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from legato.api.config import ServerConfig
from legato.core.cache_config import TransferConfig
from legato.core.config import EngineConfig, engine_parts
from legato.core.config_fields import Config, Flag
from legato.core.errors import ConfigError
from legato.core.ranges import Count, Seconds
from legato.core.version import install_command
from legato_fleet.routing.request import Role
from legato_fleet.routing.scaling import SLOWER_S, SOONER_S

Routing = Literal["kept-promise", "prefix-affinity", "power-of-two", "round-robin"]

_DEFAULT_REPLICAS = 2
_SIMULATED = "legato_lab.simulation.engine_process"
"""The program of a simulated engine. A fleet starts it, and does not import it."""

_PROXY, _ONE_ENGINE = "of Ray Serve's proxies", "of one engine, for routers in front of several"
_NOT_HERE = {
    "host": _PROXY,
    "port": _PROXY,
    "ray_address": "of the cluster that this runs on",
    "kv_events_endpoint": _ONE_ENGINE,
    "kv_events_replay_endpoint": _ONE_ENGINE,
}
"""Key a setting that a fleet does not have; value its owner."""


class Pool(msgspec.Struct, frozen=True):
    """Replicas with the same role, and their number.

    Attributes:
        fewest: started at once, and kept.
        most: the most that may be started.
    """

    role: Role
    fewest: int
    most: int


def _more(flag: str) -> Flag:
    return Flag(
        "start more of them, up to so many, where promises are about to be broken",
        default=f"as many as {flag}",
    )


class FleetConfig(Config, frozen=True, kw_only=True):
    """The number of replicas, and how requests are shared among them."""

    flag_group = "fleet"

    replicas: Annotated[
        Count | None,
        Flag(
            "engines, each with the whole model and serving whole requests",
            default=f"{_DEFAULT_REPLICAS}, unless prefill and decode are apart",
        ),
    ] = None
    max_replicas: Annotated[Count | None, _more("--replicas")] = None
    prefill_replicas: Annotated[
        Count | None,
        Flag(
            "engines that only compute prompts, and hand them to those that decode; in place of "
            "--replicas, and together with --decode-replicas",
            default="prefill and decode are not apart",
        ),
    ] = None
    decode_replicas: Annotated[
        Count | None,
        Flag(
            "engines that continue what others have prefilled", default="as for --prefill-replicas"
        ),
    ] = None
    max_prefill_replicas: Annotated[Count | None, _more("--prefill-replicas")] = None
    max_decode_replicas: Annotated[Count | None, _more("--decode-replicas")] = None
    upscale_delay_s: Annotated[
        Seconds, Flag("how long promises must be in danger before more replicas are started")
    ] = SOONER_S
    downscale_delay_s: Annotated[
        Seconds, Flag("how long fewer replicas must do before one is ended")
    ] = SLOWER_S
    routing: Annotated[
        Routing,
        Flag("how a replica is chosen: where a request's promise is most likely kept, or simpler"),
    ] = "kept-promise"
    replica_cpus: Annotated[
        float,
        msgspec.Meta(ge=0.0, le=65_536.0),
        Flag("processor cores that Ray keeps for each replica"),
    ] = 1.0
    replica_gpus: Annotated[
        float, msgspec.Meta(ge=0.0, le=65_536.0), Flag("GPUs that Ray keeps for each replica")
    ] = 0.0
    simulate: Annotated[
        str | None,
        Flag(
            "compute nothing: steps of replicas only last as this profile says, which `legato "
            "simulate` has or a file; tokens are made up",
            metavar="PROFILE",
            default="the model is computed",
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        Flag(
            "of the Ray cluster to run on, such as auto",
            metavar="ADDRESS",
            default="one is started on this machine, and ended with the fleet",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prefill_replicas is None) is not (self.decode_replicas is None):
            raise ConfigError(
                "prefill_replicas and decode_replicas go together: one computes prompts, the other "
                "continues them"
            )
        if self.replicas is not None and self.prefill_replicas is not None:
            raise ConfigError(
                "replicas serve whole requests, or prefill_replicas and decode_replicas a part "
                "each: not both"
            )
        of_role = {pool.role for pool in self.pools}
        for role, (_, most) in self._wanted.items():
            if most is not None and role not in of_role:
                raise ConfigError(f"{_named('max_', role)} goes with {_named('', role)}")
        for pool in self.pools:
            if pool.most < pool.fewest:
                raise ConfigError(
                    f"{_named('max_', pool.role)} must be at least the {pool.fewest} "
                    f"{_named('', pool.role)}, got {pool.most}"
                )

    @property
    def pools(self) -> list[Pool]:
        """The fleet's pools: one, or one that prefills and one that decodes."""
        return [
            Pool(role, fewest, fewest if most is None else most)
            for role, (fewest, most) in self._wanted.items()
            if fewest is not None
        ]

    @property
    def _wanted(self) -> dict[Role, tuple[int | None, int | None]]:
        """Fewest and most replicas of each role; None if not set."""
        replicas = self.replicas
        if replicas is None and self.prefill_replicas is None:
            replicas = _DEFAULT_REPLICAS
        return {
            "both": (replicas, self.max_replicas),
            "prefill": (self.prefill_replicas, self.max_prefill_replicas),
            "decode": (self.decode_replicas, self.max_decode_replicas),
        }


def _named(prefix: str, role: Role) -> str:
    """Return the field that counts a role's replicas."""
    return f"{prefix}replicas" if role == "both" else f"{prefix}{role}_replicas"


def replica_config(config: EngineConfig, role: Role, host: str) -> EngineConfig:
    """Return the engine configuration of a pool's replica.

    Args:
        config: the fleet's.
        host: the replica's address within the fleet.
    """
    if role == "both":
        return config
    # Any port: several replicas may share a machine, and each reports its own.
    transfer = msgspec.structs.replace(
        config.transfer, kv_role=role, kv_transfer_host=host, kv_transfer_port=0
    )
    return msgspec.structs.replace(config, transfer=transfer)


def simulated_program(profile: str) -> tuple[str, ...]:
    """Return the command that starts a simulated engine, without the last argument.

    Args:
        profile: as of `FleetConfig.simulate`.

    Raises:
        ConfigError: the program is not installed.
    """
    if find_spec(_SIMULATED.partition(".")[0]) is None:
        raise ConfigError(f"simulate needs the lab: {install_command('lab')}")
    return (sys.executable, "-m", _SIMULATED, profile)


def check_fleet(config: EngineConfig, fleet: FleetConfig, *, is_on_cluster: bool) -> None:
    """Raises `ConfigError` if the engine's settings conflict with a fleet's, or it lacks any.

    Args:
        is_on_cluster: whether replicas may be on several machines.
    """
    if fleet.simulate is not None:
        simulated_program(fleet.simulate)
    default = TransferConfig()
    for name in ("kv_role", "kv_transfer_host", "kv_transfer_port", "kv_transfer_peers"):
        if getattr(config.transfer, name) != getattr(default, name):
            raise ConfigError(
                f"{name} is what each replica of a fleet is given: prefill_replicas and "
                "decode_replicas say how many do what"
            )
    if fleet.prefill_replicas is None:
        return
    if not config.cache.enable_prefix_caching:
        raise ConfigError("prefill and decode apart need the prefix cache, which is turned off")
    if is_on_cluster and config.transfer.kv_transfer_key_file is None:
        raise ConfigError(
            "prefill and decode apart on a cluster need a kv_transfer_key_file, which each machine "
            "has: replicas can be reached from elsewhere"
        )


class FleetSettings(NamedTuple):
    """The settings of a fleet, by part."""

    engine: EngineConfig
    server: ServerConfig
    fleet: FleetConfig


def fleet_settings(settings: dict[str, Any]) -> FleetSettings:
    """Make the settings from field names and values.

    Args:
        settings: as of `front_door.app`.

    Raises:
        ConfigError: there is no such setting, or it has no such value, or Ray's proxies decide it;
            or the file of keys cannot be read.
    """
    if elsewhere := [name for name in settings if name in _NOT_HERE]:
        raise ConfigError(f"{', '.join(elsewhere)}: {_NOT_HERE[elsewhere[0]]}")
    left = dict(settings)
    for name in ("api_key", "admin_api_key"):
        if (file := f"{name}_file") in left:
            left[f"{name}s"] = (*left.get(f"{name}s", ()), *_keys(file, left.pop(file)))
    parts = {name: _taken(part, left) for name, part in engine_parts().items()}
    server, fleet = _taken(ServerConfig, left), _taken(FleetConfig, left)
    if left:
        raise ConfigError(f"no such setting: {', '.join(left)}")
    return FleetSettings(EngineConfig(**parts), server, fleet)


def _keys(name: str, path: str) -> list[str]:
    try:
        keys = Path(path).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} {path} cannot be read: {error}") from error
    if not keys:
        raise ConfigError(f"{name} {path} is empty")
    return keys


def _taken(config: type[Config], settings: dict[str, Any]) -> Any:
    """Remove one part's settings from all settings, and make its configuration."""
    own = {name: settings.pop(name) for name in config.__struct_fields__ if name in settings}
    try:
        return msgspec.convert(own, config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
