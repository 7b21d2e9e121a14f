"""Runs of command-line tools of the client's environment."""

import os
import subprocess
import sys
from pathlib import Path

REQUESTS = 6
PROMPT_TOKENS = 24
OUTPUT_TOKENS = 8
_SAID_CHARS = 400


def run_tool(name: str, *arguments: str, online: bool = False) -> None:
    """Run it in the working folder, to a good end.

    Args:
        online: do not tell it that there is no model hub.
    """
    environment = {**os.environ, "COLUMNS": "200"}
    if online:
        del environment["HF_HUB_OFFLINE"]
    command = [str(Path(sys.executable).with_name(name)), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode != 0:
        said = (ended.stdout + ended.stderr)[-_SAID_CHARS:]
        raise RuntimeError(f"{name} ended with {ended.returncode}: {said}")
