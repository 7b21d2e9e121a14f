"""What the dashboard is told."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.api.launch import ServerProcess


@contextmanager
def watching(server: ServerProcess) -> Iterator[Iterator[dict[str, Any]]]:
    """The updates of /dashboard/events; records are made from here on."""
    with server.http.stream("GET", "/dashboard/events") as response:
        response.raise_for_status()
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        updates = map(json.loads, lines)
        first = next(updates)
        yield itertools.chain([first], updates)


def steps(updates: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The records of steps among the updates."""
    for update in updates:
        yield from (record for record in update["records"] if record["kind"] == "step")
