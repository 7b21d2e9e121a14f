"""Profile files, which describe a model on a machine; all tools write and read the same format."""

from pathlib import Path
from typing import Any

import msgspec

from legato.core.errors import ConfigError
from legato.engine.calibration.calibration_file import Measurements, read_measurements
from legato.scheduler.step_costs import StepCosts
from legato_lab.simulation.clients import Delays
from legato_lab.simulation.published import GPUS, MODELS
from legato_lab.simulation.roofline import Roofline
from legato_lab.simulation.step_errors import StepErrors


class ProfileFile(Measurements, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A profile as written; docs/reference/profiles.md says how to write one by hand.

    Attributes:
        costs: of steps, measured beside the server and its clients if possible. Without costs and
            roofline, they are fitted to `steps`.
        roofline: the source of the costs: the fields of `Roofline`. A name may stand for a GPU and
            a model, and for a model also the path of a config.json, relative to the file.
        errors: of single steps.
        delays: time outside of steps.
        kv_token_bytes: size of a token's keys and values.
    """

    costs: StepCosts | None = None
    roofline: dict[str, Any] | None = None
    errors: StepErrors | None = None
    delays: Delays | None = None
    kv_token_bytes: float | None = None


def read_profile(path: Path) -> tuple[ProfileFile, Roofline | None]:
    """Read a profile and its roofline, if it has one.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: it is no profile, or has no costs of steps, or has them twice.
    """
    file = read_measurements(path, ProfileFile)
    if file.roofline is not None and (file.costs is not None or file.steps):
        raise ConfigError(f"{path} has a roofline, and costs or steps too: it must have one")
    if file.roofline is not None:
        return file, _roofline(file.roofline, path)
    if file.costs is None and not file.steps:
        raise ConfigError(f"{path} does not tell what steps cost: it has no steps, costs, roofline")
    return file, None


def _roofline(told: dict[str, Any], path: Path) -> Roofline:
    gpu, model = told.get("gpu"), told.get("model")
    if isinstance(gpu, str):
        if gpu not in GPUS:
            raise ConfigError(f"{path}: no GPU {gpu!r}; known are: {', '.join(GPUS)}")
        gpu = msgspec.to_builtins(GPUS[gpu])
    if isinstance(model, str):
        model = msgspec.to_builtins(MODELS[model]) if model in MODELS else _config(path, model)
    try:
        return msgspec.convert({**told, "gpu": gpu, "model": model}, Roofline)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: roofline: {error}") from error


def _config(path: Path, name: str) -> Any:
    try:
        return msgspec.json.decode((path.parent / name).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{path}: model {name!r} is no config.json, nor one of {', '.join(MODELS)}: {error}"
        ) from error
