"""Lines of the log: for people on a terminal, plain in files, or JSON; one form in all processes.

A process that configures the log passes its level and form on to its children.
"""

import logging
import os
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Literal

LogFormat = Literal["auto", "text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = ("auto", "text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that a task answers; empty outside of any."""

_LEVEL, _FORMAT = "LEGATO_LOG_LEVEL", "LEGATO_LOG_FORMAT"
_COLOURS = {"DEBUG": 36, "INFO": 32, "WARNING": 33, "ERROR": 31, "CRITICAL": 31}
_DIM = 2


class _Lines(logging.Formatter):
    """One line a record, with time, level, logger and, within a request, the request's id."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return super().formatMessage(record) + _suffix(record)


class _TerminalLines(logging.Formatter):
    """As uvicorn's lines: the level in its colour, the time of the day, and the message."""

    default_msec_format = None
    default_time_format = "%H:%M:%S"

    def __init__(self, *, is_coloured: bool) -> None:
        super().__init__("%(asctime)s %(message)s")
        self._is_coloured = is_coloured

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        level = f"{record.levelname}:{' ' * (9 - len(record.levelname))}"
        line, suffix = super().formatMessage(record), _suffix(record)
        if self._is_coloured:
            level = _coloured(level, _COLOURS.get(record.levelname, _DIM))
            suffix = _coloured(suffix, _DIM) if suffix else ""
        return level + line + suffix


def configure_logging(level: str, form: LogFormat = "auto") -> None:
    """Log to the standard error from a level on, in this process and its children.

    Args:
        level: one of `LOG_LEVELS`.
        form: "auto" is for people on a terminal, and plain lines elsewhere.
    """
    os.environ.update({_LEVEL: level, _FORMAT: form})
    follow_logging()


def follow_logging(environment: Mapping[str, str] = os.environ) -> None:
    """Log as the process that started this one; at the level info without one."""
    handler = logging.StreamHandler()
    handler.setFormatter(_formatter(environment.get(_FORMAT, "auto")))
    handler.addFilter(_with_request_id)
    level = environment.get(_LEVEL, "info").upper()
    logging.basicConfig(level=level, handlers=[handler], force=True)


def _formatter(form: str) -> logging.Formatter:
    if form == "json":
        # Local import: only such logs need it.
        from pythonjsonlogger.core import RESERVED_ATTRS
        from pythonjsonlogger.json import JsonFormatter

        return JsonFormatter(
            "{levelname}{name}{process}{message}",
            style="{",
            rename_fields={"levelname": "level", "name": "logger"},
            # uvicorn's message again, with codes of colours.
            reserved_attrs=[*RESERVED_ATTRS, "color_message"],
            timestamp="time",
        )
    if form == "auto" and sys.stderr.isatty():
        return _TerminalLines(is_coloured=not os.environ.get("NO_COLOR"))
    return _Lines()


def _with_request_id(record: logging.LogRecord) -> bool:
    if asked := request_id.get():
        record.request_id = asked
    return True


def _suffix(record: logging.LogRecord) -> str:
    asked = getattr(record, "request_id", "")
    return f" [{asked}]" if asked else ""


def _coloured(text: str, code: int) -> str:
    return f"\N{ESCAPE}[{code}m{text}\N{ESCAPE}[0m"
