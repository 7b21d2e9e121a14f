"""Keeps the steps of a calibration on disk, for the next start on the same machine.

The file is a profile: the simulator and the tuner read it too.
"""

import fcntl
import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
_UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.json\.[0-9a-f]+")
_ABANDONED_S = 3600.0
"""Age at which an unfinished file is one of a process that was killed."""
_LOCK_TRIES, _LOCK_WAIT_S = 100, 0.02
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

    Of writers at the same time, the last one's whole file stays.

    Raises:
        OSError: the folder is not writable.
        ConfigError: the profile could not be read again, as with a number that is not finite.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {key: value for key, value in msgspec.to_builtins(profile).items() if value}
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with unfinished.open("xb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(told)))
            file.flush()
            os.fsync(file.fileno())
        read_measurements(unfinished, type(profile))
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


class CalibrationFile:
    """The file of the measurements that depend on the same values.

    Engines on one machine share it. Each writes whole files, and the last one stays; `keep_tails`
    changes the tails alone, in what was written last.

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
        with self._locked():
            self._write(measured)

    def keep_tails(self, tails: Tails) -> None:
        """Replace the tails of the measurements on disk, if there are any."""
        with self._locked():
            kept = self.load()
            if kept is not None:
                self._write(msgspec.structs.replace(kept, tails=tails))

    def remove(self, wrong: Measurements) -> None:
        """Remove measurements that turned out to be wrong, unless others have taken their place."""
        with self._locked():
            kept = self.load()
            if kept is not None and kept.steps == wrong.steps:
                with suppress(OSError):
                    self.path.unlink()

    def _write(self, measured: Measurements) -> None:
        try:
            write_profile(self.path, measured)
        except (OSError, ConfigError) as error:
            logger.warning("the calibration is not kept: %s", error)
            return
        self._remove_others()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other engines from writing.

        Not if the file system has no locks of folders, nor if an engine keeps the lock for long,
        as one that was stopped meanwhile does.
        """
        try:
            folder = os.open(self.path.parent, os.O_RDONLY)
        except OSError:  # there is no folder yet, and nothing to lose
            yield
            return
        try:
            for _ in range(_LOCK_TRIES):
                try:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_LOCK_WAIT_S)
                except OSError:
                    break
            yield
        finally:
            os.close(folder)

    def _remove_others(self) -> None:
        """Remove what was used least recently; other engines may do so at the same time."""
        used_s: dict[Path, float] = {}
        with suppress(OSError):
            for path in self.path.parent.iterdir():
                with suppress(OSError):
                    if _UNFINISHED.fullmatch(path.name):
                        if path.stat().st_mtime < time.time() - _ABANDONED_S:
                            path.unlink()
                    elif _NAME.fullmatch(path.name) and path != self.path:
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
