"""Writes what a feed publishes to a file, off the event loop."""

import asyncio
import contextlib
import logging
from pathlib import Path

from legato.observe.traces.feed import RecordFeed
from legato.observe.traces.formats import TraceWriter, trace_writer
from legato.observe.traces.trace_file import RecordsDropped, TraceHeader, TraceLine

logger = logging.getLogger(__name__)

_GATHER_S = 0.1
"""Records are written together: a thread that wakes for each step takes the steps' time."""


class Tracer:
    """One trace, from its making until `stop`, an error, or `max_bytes` written.

    Args:
        path: is overwritten; its name tells the format, as in `trace_writer`.
        settings: as in `TraceHeader`.
        max_bytes: before compression.

    Attributes:
        error: why the trace ended before its time; None while all is well.

    Raises:
        ConfigError: no format has such names.
        OSError: the file cannot be written.
    """

    def __init__(
        self, feed: RecordFeed, path: Path, settings: dict[str, str], max_bytes: int
    ) -> None:
        self.path = path
        self.error: str | None = None
        self._max_bytes = max_bytes
        self._writer = trace_writer(path, TraceHeader.now(settings))
        self._subscription = feed.subscribe()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write what has come, and close the file."""
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
        with contextlib.suppress(OSError):  # of what could not be written, which was told
            await asyncio.to_thread(self._writer.close)

    def _check_size(self, writer: TraceWriter) -> None:
        if writer.num_bytes >= self._max_bytes and self.error is None:
            self._fail(f"the trace ended at {self._max_bytes} bytes")

    def _fail(self, error: str) -> None:
        logger.error("%s (%s)", error, self.path)
        self.error = error
        self._subscription.close()
