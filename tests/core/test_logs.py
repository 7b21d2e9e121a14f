"""Lines of the log, in each form."""

import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from legato.core import logs

logger = logging.getLogger("legato.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, io.StringIO], str]]:
    """Log a line and a failure in some form; the root logger is as before afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def logged(form: str, shown: io.StringIO) -> str:
        monkeypatch.setattr("sys.stderr", shown)
        logs.follow_logging({"LEGATO_LOG_FORMAT": form})
        asked = logs.request_id.set("req-7")
        logger.warning("%d steps are late", 3, extra={"color_message": "\x1b[36m%d\x1b[0m steps"})
        logs.request_id.reset(asked)
        try:
            raise ValueError("no such thing")
        except ValueError:
            logger.exception("it failed")
        logger.debug("unseen")
        return shown.getvalue()

    yield logged
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text_has_time_level_and_request(lines: Callable[[str, io.StringIO], str]) -> None:
    first, second, *trace = lines("auto", io.StringIO()).splitlines()
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(f"{time} WARNING legato.test: 3 steps are late \\[req-7\\]", first)
    assert re.fullmatch(f"{time} ERROR legato.test: it failed", second)
    assert trace[-1] == "ValueError: no such thing"


def test_json_is_an_object_a_line(lines: Callable[[str, io.StringIO], str]) -> None:
    first, second = map(json.loads, lines("json", Terminal()).splitlines())
    assert {"time", "process"} < first.keys()
    del first["time"], first["process"]
    assert first == {
        "level": "WARNING",
        "logger": "legato.test",
        "message": "3 steps are late",
        "request_id": "req-7",
    }
    assert "request_id" not in second
    assert "ValueError: no such thing" in second["exc_info"]


def test_a_terminal_has_lines_as_uvicorns(
    lines: Callable[[str, io.StringIO], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lines("auto", Terminal()).splitlines()[0]
    assert re.fullmatch(
        r"\x1b\[33mWARNING:  \x1b\[0m\d\d:\d\d:\d\d 3 steps are late\x1b\[2m \[req-7\]\x1b\[0m",
        first,
    )
    monkeypatch.setenv("NO_COLOR", "")  # as if it were not set, by no-color.org
    assert "\x1b" in lines("auto", Terminal()).splitlines()[0]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in lines("auto", Terminal()).splitlines()[0]


def test_processes_that_are_started_log_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEGATO_LOG_LEVEL", "LEGATO_LOG_FORMAT"):
        monkeypatch.setenv(name, "")  # so that it is set back
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    logs.configure_logging("error", "json")
    logging.getLogger().handlers[:] = handlers
    logging.getLogger().setLevel(level)
    code = (
        "import logging; from legato.core.logs import follow_logging; follow_logging()\n"
        "logging.warning('no'); logging.error('yes')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stderr)["message"] == "yes"
