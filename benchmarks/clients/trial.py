"""One client's script against one server."""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

_STDERR_CHARS = 300
_CAPABILITIES = 20
"""More than any script tries."""

Status = Literal["ok", "failed", "client"]
"""How it went: `client` is a fault of the client's own."""


class Outcome(msgspec.Struct, frozen=True):
    """What became of one capability; the line by which a script says so.

    Attributes:
        message: why it is not ok, or the figure that it found.
    """

    capability: str
    status: Status
    message: str


class Target(msgspec.Struct, frozen=True):
    """A server to try.

    Attributes:
        url: without "/v1".
        tokenizer: a folder with the tokenizer of `model`.
    """

    url: str
    model: str
    tokenizer: Path


def outcomes(
    command: Sequence[str], target: Target, patience_s: int, folder: Path
) -> list[Outcome]:
    """Run a script to its end. What it was to try, and did not come to, has failed.

    Args:
        patience_s: seconds for one capability.
        folder: where it runs, and may write.
    """
    stdout, ending = _output(command, _environment(target, patience_s), patience_s, folder)
    tries: list[str] = []
    found: dict[str, Outcome] = {}
    for line in stdout.splitlines():
        if line.startswith('{"tries"'):
            tries = json.loads(line)["tries"]
        elif line.startswith('{"capability"'):
            outcome = msgspec.json.decode(line, type=Outcome)
            found[outcome.capability] = outcome
    lost = [Outcome(one, "failed", ending) for one in tries or ["chat"] if one not in found]
    return [*found.values(), *lost]


def _output(
    command: Sequence[str], environment: dict[str, str], patience_s: int, folder: Path
) -> tuple[str, str]:
    """What a script prints, and how it ended."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=_CAPABILITIES * patience_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            stdout, stderr = process.communicate()
        finally:
            _kill(process)
    return stdout, f"the script ended with {process.returncode}: {stderr[-_STDERR_CHARS:].strip()}"


def _kill(process: subprocess.Popen[str]) -> None:
    """With all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _environment(target: Target, patience_s: int) -> dict[str, str]:
    """As `scripts/protocol.*` read it; no client needs a model hub, and some would wait for it."""
    return {
        **os.environ,
        "CLIENTS_URL": target.url,
        "CLIENTS_MODEL": target.model,
        "CLIENTS_TOKENIZER": str(target.tokenizer),
        "CLIENTS_TIMEOUT_S": str(patience_s),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
