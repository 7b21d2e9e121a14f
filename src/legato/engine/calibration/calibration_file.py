"""Keeps the steps of a calibration on disk, for the next start on the same machine.

The file is a profile: the simulator and the tuner read it too.
"""

import hashlib
import logging
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
import platformdirs

from legato.core.errors import ConfigError
from legato.core.rows import CPU_ROWS, RowCounts
from legato.scheduler.cost_fit import MeasuredStep
from legato.scheduler.margin import Tails
from legato.scheduler.step_shape import StepShape

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{16}\.json")
_MOST_FILES = 64
"""In a folder. Each update, model and setting makes another; a start uses one of them."""

Found = TypeVar("Found", bound="Measurements")
Figures = Literal["measured", "published", "assumed"]


class Measurements(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of a profile (docs/reference/profiles.md) that a calibration measures.

    Attributes:
        figures: their source.
        about: all that they depend on: model, dtype, device, threads, versions.
        steps: steps of the idle engine: the shape's counts by name, and the step's seconds.
        rows: the numbers of rows to which their batches are padded.
        max_model_len: longest prompt plus output in tokens; None if unknown.
        kv_cache_tokens: tokens whose keys and values fit into the memory; None if unknown.
        tails: how far steps in service exceeded their predictions; None if there were none yet.
    """

    figures: Figures = "assumed"
    about: dict[str, str] = {}
    steps: list[tuple[dict[str, float], Annotated[float, msgspec.Meta(gt=0.0)]]] = []
    rows: RowCounts = CPU_ROWS
    max_model_len: int | None = None
    kv_cache_tokens: int | None = None
    tails: Tails | None = None

    @property
    def measured_steps(self) -> list[MeasuredStep]:
        """The steps; raises `AttributeError` if a shape has no such count."""
        return [(shape_of(counts), seconds) for counts, seconds in self.steps]


def read_measurements(path: Path, kind: type[Found]) -> Found:
    """Read a file of this kind.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: it is not a profile.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=kind)
        found.measured_steps  # noqa: B018
    except FileNotFoundError:
        raise
    except (OSError, msgspec.DecodeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"cannot read {path} as a profile: {error}") from error
    return found


def write_profile(path: Path, profile: Measurements) -> None:
    """Write a profile as JSON, all or nothing, and make its folder.

    Raises:
        OSError: the folder is not writable.
        ConfigError: the profile could not be read again, as with a number that is not finite.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {key: value for key, value in msgspec.to_builtins(profile).items() if value}
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(told)))
        read_measurements(Path(name), type(profile))
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class CalibrationFile:
    """The file of the measurements that depend on the same values.

    Args:
        folder: None for the user's cache folder.
        about: as in `Measurements`.
    """

    def __init__(self, folder: str | None, about: dict[str, str]) -> None:
        root = Path(folder) if folder else platformdirs.user_cache_path("legato") / "step-time"
        digest = hashlib.sha256(msgspec.json.encode(about, order="sorted")).hexdigest()
        self.about = about
        self.path = root / f"{digest[:16]}.json"

    def load(self) -> Measurements | None:
        """Return the measurements; None if there is no readable file."""
        try:
            found = read_measurements(self.path, Measurements)
        except FileNotFoundError:
            return None
        except ConfigError as error:
            logger.warning("%s", error)
            return None
        if found.about != self.about:
            return None
        with suppress(OSError):  # the folder may be another user's
            os.utime(self.path)
        return found

    def save(self, measured: Measurements) -> None:
        """Write the measurements, and remove the files that were used least recently of many.

        If the folder is not writable, or the measurements could not be read again, log a warning.
        """
        try:
            write_profile(self.path, measured)
        except (OSError, ConfigError) as error:
            logger.warning("the calibration is not kept: %s", error)
            return
        self._remove_others()

    def _remove_others(self) -> None:
        """Remove what was used least recently; other engines may do so at the same time."""
        used_s: dict[Path, float] = {}
        with suppress(OSError):
            for path in self.path.parent.iterdir():
                if _NAME.fullmatch(path.name) and path != self.path:
                    with suppress(OSError):
                        used_s[path] = path.stat().st_mtime
        for path in sorted(used_s, key=used_s.__getitem__)[: 1 - _MOST_FILES]:
            with suppress(OSError):
                path.unlink()


def shape_counts(shape: StepShape) -> dict[str, float]:
    """Return a shape's counts as a file keeps them; key: the count's name."""
    return {name: getattr(shape, name) for name in StepShape.__slots__}


def shape_of(counts: dict[str, float]) -> StepShape:
    """Return the shape with these counts, the inverse of `shape_counts`.

    Raises:
        AttributeError: a shape has no such count.
    """
    shape = StepShape()
    for name, count in counts.items():
        setattr(shape, name, count)
    return shape
