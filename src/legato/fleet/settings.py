"""A fleet's settings, as given in deployment files."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from legato.core.config import EngineConfig, engine_parts
from legato.core.config_fields import Config
from legato.core.errors import ConfigError
from legato.fleet.config import FleetConfig
from legato.server.config import ServerConfig

_PROXY, _ONE_ENGINE = "of Ray Serve's proxies", "of one engine, for routers in front of several"
_NOT_HERE = {
    "host": _PROXY,
    "port": _PROXY,
    "ray_address": "of the cluster that this runs on",
    "kv_events_endpoint": _ONE_ENGINE,
    "kv_events_replay_endpoint": _ONE_ENGINE,
}
"""Key a setting that a fleet does not have; value its owner."""


class FleetSettings(NamedTuple):
    """The settings of a fleet, by part."""

    engine: EngineConfig
    server: ServerConfig
    fleet: FleetConfig


def fleet_settings(settings: dict[str, Any]) -> FleetSettings:
    """Make the settings from field names and values.

    Args:
        settings: as of `legato.fleet.app`.

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
