"""Traces as lines of JSON, one record a line: lossless, and readable even if the writer was killed.

The first line is a `TraceHeader`; the records follow in the order in which they became known. A
file with a name that ends with ".gz" is compressed.
"""

import gzip
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.step_record import Record
from legato.core.version import __version__

VERSION = 3
_READ = (2, VERSION)
"""Version 2 has no `basis`."""


class ReplayBasis(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay of the plans needs beside the records.

    Attributes:
        scheduler: resolved, as the trace began; a later change is not recorded. Without slack for
            drafts, as it may be infinite and no replay has drafts.
        max_model_len: as of `Scheduler`.
        num_blocks, block_size: of the KV cache.
    """

    scheduler: SchedulerConfig
    max_model_len: int
    num_blocks: int
    block_size: int

    def __post_init__(self) -> None:
        written = msgspec.structs.replace(self.scheduler, speculative_slack=0.0)
        msgspec.structs.force_setattr(self, "scheduler", written)


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True, tag="trace", tag_field="kind"):
    """The first line of a trace.

    Attributes:
        version: of the format.
        legato_version: of the writer.
        started_s: on the records' clock.
        unix_s: offset from the records' times to Unix time; None on a virtual clock.
        settings: of the engine; key a flag's name, value as printed.
        basis: None if it is unknown, or another version's.
    """

    version: int = VERSION
    legato_version: str = __version__
    started_s: float
    unix_s: float | None
    settings: dict[str, str]
    basis: ReplayBasis | None = None

    @classmethod
    def now(cls, settings: dict[str, str], basis: ReplayBasis | None = None) -> "TraceHeader":
        """Make the header of a trace that begins now, on the clock of `time.monotonic`."""
        now_s = time.monotonic()
        return cls(started_s=now_s, unix_s=time.time() - now_s, settings=settings, basis=basis)


class RecordsDropped(msgspec.Struct, frozen=True, kw_only=True, tag="dropped", tag_field="kind"):
    """`num_records` records are missing here, because they could not be written in time."""

    num_records: int


TraceLine = Record | RecordsDropped

_Line = TraceHeader | TraceLine
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Line).decode


class JsonlTrace:
    """Writes a trace; after each `write`, the file has all its lines, complete.

    Attributes:
        num_bytes: written so far, before compression.

    Raises:
        OSError: the file cannot be written to; raised by any method.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self.num_bytes = 0
        self._file = open_binary(path, "wb")
        self._put(_encode(header) + b"\n")

    def write(self, lines: Iterable[TraceLine]) -> None:
        self._put(b"".join(_encode(line) + b"\n" for line in lines))

    def close(self) -> None:
        self._file.close()

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()
        self.num_bytes += len(data)


def read_trace(path: Path) -> tuple[TraceHeader, Iterator[TraceLine]]:
    """Return the header of a trace and an iterator over its lines.

    An incomplete last line is skipped.

    Raises:
        ConfigError: this is no trace, or it cannot be read; also raised by the iterator.
    """
    lines = _lines(path)
    header = next(lines, None)
    if not isinstance(header, TraceHeader):
        raise ConfigError(f"{path} is not a trace of lines of JSON, as --trace FILE.jsonl writes")
    if header.version not in _READ:
        raise ConfigError(
            f"{path} is a trace of version {header.version}; this reads 2 and {VERSION}"
        )
    return header, cast("Iterator[TraceLine]", lines)


def _lines(path: Path) -> Iterator[_Line]:
    try:
        with open_binary(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield _parsed(path, number, line)
    except EOFError:
        return  # compressed, by a writer that was killed
    except (OSError, zlib.error) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _parsed(path: Path, number: int, line: bytes) -> _Line:
    try:
        read: _Line = _decode(line)
    except (msgspec.DecodeError, ConfigError) as error:
        header = _without_basis(line) if number == 1 else None
        if header is None:
            raise ConfigError(f"{path}, line {number} is not a line of a trace: {error}") from error
        return header
    return read


def _without_basis(line: bytes) -> TraceHeader | None:
    """Return a header whose settings are another version's; None if that is not what is wrong."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
        fields["basis"] = None
        return msgspec.convert(fields, TraceHeader)
    except msgspec.DecodeError:
        return None


def open_binary(path: Path, mode: str) -> IO[bytes]:
    """Open a file, compressed if its name ends with ".gz"."""
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path, mode, compresslevel=1))
    return cast("IO[bytes]", path.open(mode))
