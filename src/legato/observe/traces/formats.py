"""Which name a trace's file has in which format."""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Protocol

from legato.core.errors import ConfigError
from legato.observe.traces.perfetto import PerfettoTrace
from legato.observe.traces.trace_file import JsonlTrace, TraceHeader, TraceLine

TraceFormat = Literal["jsonl", "perfetto"]

_FORMATS: dict[str, TraceFormat] = {".jsonl": "jsonl", ".json": "perfetto"}  # key suffix


class TraceWriter(Protocol):
    """As `JsonlTrace` describes."""

    num_bytes: int

    def write(self, lines: Iterable[TraceLine]) -> None: ...

    def close(self) -> None: ...


def trace_format(path: Path) -> TraceFormat:
    """What a file of this name is written in.

    Raises:
        ConfigError: no format has such names.
    """
    name = path.name.removesuffix(".gz")
    for suffix, found in _FORMATS.items():
        if name.endswith(suffix):
            return found
    raise ConfigError(
        f"a trace's name ends with .jsonl (lines of JSON) or .json (for the Perfetto UI), and .gz "
        f"behind it where it is to be compressed; got {path.name!r}"
    )


def trace_writer(path: Path, header: TraceHeader) -> TraceWriter:
    """Begin a trace.

    Raises:
        ConfigError: as `trace_format`.
        OSError: the file cannot be written.
    """
    kind = JsonlTrace if trace_format(path) == "jsonl" else PerfettoTrace
    return kind(path, header)
