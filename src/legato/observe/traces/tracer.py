"""Writes a feed's records to a trace file, in the format of the file's name."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Protocol

from legato.core.errors import ConfigError
from legato.core.step_record import Record
from legato.observe.traces.feed import RecordFeed
from legato.observe.traces.perfetto import PerfettoTrace
from legato.observe.traces.trace_file import (
    JsonlTrace,
    RecordsDropped,
    ReplayBasis,
    TraceHeader,
    TraceLine,
)

logger = logging.getLogger(__name__)

TraceFormat = Literal["jsonl", "perfetto"]

_FORMATS: dict[str, TraceFormat] = {".jsonl": "jsonl", ".json": "perfetto"}  # key suffix

_GATHER_S = 0.1
"""Records are written in batches: a thread that wakes for each step would slow the steps."""


class TraceWriter(Protocol):
    """See `JsonlTrace`."""

    num_bytes: int

    def write(self, lines: Iterable[TraceLine]) -> None: ...

    def close(self) -> None: ...


def trace_format(path: Path) -> TraceFormat:
    """Return the format of a file with this name.

    Raises:
        ConfigError: no format has such a name.
    """
    name = path.name.removesuffix(".gz")
    for suffix, found in _FORMATS.items():
        if name.endswith(suffix):
            return found
    raise ConfigError(
        f"a trace's name ends with .jsonl (lines of JSON) or .json (for the Perfetto UI), with .gz "
        f"after it to compress the trace; got {path.name!r}"
    )


def trace_writer(path: Path, header: TraceHeader) -> TraceWriter:
    """Start a trace in the format of its file's name.

    Raises:
        ConfigError: as `trace_format`.
        OSError: the file cannot be written.
    """
    kind = JsonlTrace if trace_format(path) == "jsonl" else PerfettoTrace
    return kind(path, header)


class Tracer:
    """One trace, written until `stop`, an error, or `max_bytes` bytes.

    Args:
        path: overwritten; its name selects the format, as in `trace_format`.
        settings, basis: as in `TraceHeader`.
        max_bytes: before compression.

    Attributes:
        error: why the trace ended early; None if it did not.

    Raises:
        ConfigError: no format has such a name.
        OSError: the file cannot be written.
    """

    def __init__(
        self,
        feed: RecordFeed[Record],
        path: Path,
        settings: dict[str, str],
        max_bytes: int,
        basis: ReplayBasis | None = None,
    ) -> None:
        self.path = path
        self.error: str | None = None
        self._max_bytes = max_bytes
        self._writer = trace_writer(path, TraceHeader.now(settings, basis))
        self._subscription = feed.subscribe()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write all records received so far, and close the file."""
        self._subscription.close()
        await self._task

    async def _run(self) -> None:
        num_dropped = 0
        try:
            while records := await self._subscription.take():
                lines: list[TraceLine] = [*records]
                if self._subscription.num_dropped > num_dropped:
                    missing = self._subscription.num_dropped - num_dropped
                    num_dropped += missing
                    lines.append(RecordsDropped(num_records=missing))
                await asyncio.to_thread(self._writer.write, lines)
                self._check_size(self._writer)
                await self._subscription.gather(_GATHER_S)
        except OSError as error:
            self._fail(f"the trace could not be written: {error}")
        with contextlib.suppress(OSError):  # a write error that has been reported
            await asyncio.to_thread(self._writer.close)

    def _check_size(self, writer: TraceWriter) -> None:
        if writer.num_bytes >= self._max_bytes and self.error is None:
            self._fail(f"the trace ended at {self._max_bytes} bytes")

    def _fail(self, error: str) -> None:
        logger.error("%s (%s)", error, self.path)
        self.error = error
        self._subscription.close()
