"""How a script says what its client can do. It runs in the client's environment: stdlib alone.

A script declares a function for each capability of its client, and ends with `run()`:

    @can("chat")
    def chat() -> None:
        answer = client.chat(...)
        check(answer.text, "there is no text")

Standard output then has a line of JSON for what the script is to try, and one for each outcome;
other lines mean nothing. A function that raises has failed, but with `ClientFaultError` it is the
client that could not.
"""

import asyncio
import inspect
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Coroutine
from typing import Any

URL = os.environ["CLIENTS_URL"]
"""The server's, without "/v1"."""
MODEL = os.environ["CLIENTS_MODEL"]
TOKENIZER = os.environ["CLIENTS_TOKENIZER"]
"""A folder with tokenizer.json, for clients that count tokens."""
BASE_URL = f"{URL}/v1"
KEY = "none"

TIMEOUT_S = int(os.environ["CLIENTS_TIMEOUT_S"])
"""For one capability."""
_IDLE_TIMEOUT_S = 10.0

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
"""The parameters of a tool, and an answer's schema: its strings are short enough for any model."""

_functions: dict[str, Callable[[], Any]] = {}


class ClientFaultError(Exception):
    """The client cannot do this with any server; the text says why."""


class OutOfTimeError(BaseException):
    """No `Exception`, for clients take those for a lost connection and try again."""


def can(capability: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Declare that the client has a capability of `capabilities.py`, and how to see it."""

    def declare(function: Callable[[], Any]) -> Callable[[], Any]:
        _functions[capability] = function
        return function

    return declare


def check(holds: object, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def check_city(arguments: str | dict[str, Any]) -> None:
    """That these are `WEATHER`'s arguments, as JSON or as an object."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    check(set(found) == {"city"} and found["city"] in ("Paris", "Rome"), f"not valid: {arguments}")


def check_idle() -> None:
    """Check that the server soon runs no request: it has noticed that a client went away."""
    deadline_s = time.monotonic() + _IDLE_TIMEOUT_S
    while running := _running():
        check(time.monotonic() < deadline_s, f"{running:g} requests run on after their client left")
        time.sleep(0.1)


async def check_cancelled(answer: Coroutine[Any, Any, object]) -> None:
    """That the server stops where a task that awaits an answer is cancelled."""
    task = asyncio.create_task(answer)
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(check_idle)


def run() -> None:
    """Try each capability, and say how it went."""
    _say(tries=list(_functions))
    signal.signal(signal.SIGALRM, _time_out)
    # One loop for all, because clients keep connections from one call to the next.
    with asyncio.Runner() as loop:
        for capability, function in _functions.items():
            try:
                _try(function, loop)
                _say(capability=capability, status="ok", message="")
            except ClientFaultError as fault:
                _say(capability=capability, status="client", message=str(fault))
            # A client raises what it likes.
            except BaseException as error:
                message = f"{type(error).__name__}: {error}"
                _say(capability=capability, status="failed", message=message)


def _try(function: Callable[[], Any], loop: asyncio.Runner) -> None:
    if inspect.iscoroutinefunction(function):
        loop.run(asyncio.wait_for(function(), TIMEOUT_S))
        return
    signal.alarm(TIMEOUT_S)
    try:
        function()
    finally:
        signal.alarm(0)


def _time_out(*_: object) -> None:
    raise OutOfTimeError(f"not done after {TIMEOUT_S} s")


def _running() -> float:
    """Requests that run, by the server's metrics."""
    with urllib.request.urlopen(f"{URL}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    samples = [line for line in lines if ":num_requests_running" in line and line[0] != "#"]
    return sum(float(line.rsplit(" ", 1)[1]) for line in samples)


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)
