"""Keeps what a calibration measured on disk, for the next start on the same machine."""

import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import platformdirs

from legato.core.errors import ConfigError
from legato.scheduler.cost_fit import MeasuredStep
from legato.scheduler.step_shape import StepShape

logger = logging.getLogger(__name__)

Key = dict[str, str]
"""Whatever the measurements depend on: model, dtype, device, threads, versions."""


class _Measurements(msgspec.Struct, frozen=True):
    """Attributes: `steps`: the shape's counts, by their name, and the step's seconds."""

    key: Key
    steps: list[tuple[dict[str, float], Annotated[float, msgspec.Meta(gt=0.0)]]]


def read_calibration(path: Path) -> tuple[Key, list[MeasuredStep]]:
    """What a file holds, and what it depends on.

    Raises:
        FileNotFoundError: there is none.
        ConfigError: it is not a calibration.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Measurements)
        return found.key, [(shape_of(counts), seconds) for counts, seconds in found.steps]
    except FileNotFoundError:
        raise
    except (OSError, msgspec.DecodeError, AttributeError) as error:
        raise ConfigError(f"cannot read {path} as a calibration: {error}") from error


class CalibrationFile:
    """One file for each key.

    Args:
        folder: None takes the user's cache folder.
    """

    def __init__(self, folder: str | None, key: Key) -> None:
        root = Path(folder) if folder else platformdirs.user_cache_path("legato") / "step-time"
        digest = hashlib.sha256(msgspec.json.encode(key, order="sorted")).hexdigest()
        self._key = key
        self.path = root / f"{digest[:16]}.json"

    def load(self) -> list[MeasuredStep] | None:
        """The measurements, or None if there are none that can be read."""
        try:
            key, steps = read_calibration(self.path)
        except FileNotFoundError:
            return None
        except ConfigError as error:
            logger.warning("%s", error)
            return None
        return steps if key == self._key else None

    def save(self, steps: list[MeasuredStep]) -> None:
        """Write them, all or nothing. A folder that is not writable is worth a warning only."""
        data = _Measurements(
            self._key, [(shape_counts(shape), seconds) for shape, seconds in steps]
        )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(data)))
            os.replace(name, self.path)
        except OSError as error:
            logger.warning("the calibration is not kept: %s", error)


def shape_counts(shape: StepShape) -> dict[str, float]:
    """What a file keeps of a shape; key the count's name."""
    return {name: getattr(shape, name) for name in StepShape.__slots__}


def shape_of(counts: dict[str, float]) -> StepShape:
    """Inverse of `shape_counts`.

    Raises:
        AttributeError: a shape has no such count.
    """
    shape = StepShape()
    for name, count in counts.items():
        setattr(shape, name, count)
    return shape
