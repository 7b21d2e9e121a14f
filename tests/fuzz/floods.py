"""Floods of completions, all at once, by tenants, classes and priorities as chance has it."""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any

from tests.api.launch import ServerProcess
from tests.api.wire import connect, post, read_response
from tests.fuzz.clients import UnexpectedAnswerError

FLOOD_FLAGS = ("--max-num-seqs", "8", "--max-waiting", "24", "--ttft-slo", "2s", "--shed-load")
"""Few places, so that a flood fills them and the queue."""
_MOST_AT_ONCE = 40
_MOST_TENANTS = 20
_STAY_S = 30.0
_OK = (200, 429)


def flood(server: ServerProcess, seed: int) -> tuple[str, Counter[str]]:
    """Let a flood come; some clients leave before they are answered.

    Returns:
        The number of its tenants, roughly, and what the clients were told as by `clients.attack`.

    Raises:
        UnexpectedAnswerError: the engine died, or a client was told something else.
    """
    rng = random.Random(seed)
    num_tenants = rng.choice([1, 2, 3, _MOST_TENANTS])
    bodies = [_body(rng, num_tenants) for _ in range(rng.randint(2, _MOST_AT_ONCE))]
    with ThreadPoolExecutor(len(bodies)) as pool:
        told = Counter(pool.map(lambda body: _send(server, body), bodies))
    if server.metric("num_engine_restarts_total") or server.metric("num_contained_errors_total"):
        raise UnexpectedAnswerError("the engine died, or erred")
    return f"{num_tenants} tenants", told


def _body(rng: random.Random, num_tenants: int) -> tuple[dict[str, Any], bool]:
    """What is asked for, and whether its client leaves."""
    prompt = [rng.randrange(1000, 2000)] * rng.choice([1, 20, 300, 2000])
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": rng.choice([1, 8, 40]),
        "n": rng.choice([1, 1, 1, 4]),
        "slo_class": rng.choice(["interactive", "interactive", "batch"]),
        "priority": rng.choice([0, 0, -5, 100]),
        "allow_best_effort": rng.random() < 0.2,
    }
    tenant = rng.randrange(num_tenants)
    if tenant:
        body["tenant"] = f"tenant-{tenant}"
    return body, rng.random() < 0.1


def _send(server: ServerProcess, one: tuple[dict[str, Any], bool]) -> str:
    body, leaves = one
    with connect(server) as sock:
        sock.settimeout(_STAY_S)
        try:
            sock.sendall(post("/v1/completions", body))
            if leaves:
                return "left"
            status, answer = read_response(sock)
        except TimeoutError:
            return "left"
        except (ConnectionError, HTTPException):
            return "disconnected"
    if status not in _OK:
        raise UnexpectedAnswerError(f"{status}: {answer!r}")
    return str(status)
