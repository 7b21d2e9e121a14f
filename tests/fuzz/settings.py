"""A client that changes a server's settings at random while streams run."""

import json
import random
from collections import Counter
from http import HTTPStatus
from typing import Any

from tests.api.launch import ServerProcess, long_request
from tests.api.wire import connect, post
from tests.fuzz.clients import UnexpectedAnswerError, answer, check

_NUM_TOKENS = 30
_SECONDS: list[Any] = [
    5e-324, 1e-300, 1e-9, 9.99e-7, 1e-6, 1e-3, 0.05, 0.1, 2, 86_400, 86_400.1, 1e300,
]  # fmt: skip
_COUNTS: list[Any] = [0, 1, 7, 16, 512, 2048, 8192, 2**31 - 1, 2**31, 2**63, 10**400]
_WRONG: list[Any] = [None, -1, "", "1", True, [], {}, 1e-17, float("inf"), float("nan"), -0.0]
_VALUES: dict[str, list[Any]] = {
    "policy": ["stall-free", "prefill-first", "whole"],
    "max_num_batched_tokens": _COUNTS,
    "enable_chunked_prefill": [True, False],
    "prefill_order": ["slowdown", "fcfs", "edf", "lpm"],
    "max_wait_s": _SECONDS,
    "itl_slo_s": _SECONDS,
    "itl_slo_quantile": [0, 0.4999, 0.5, 0.99, 0.9999, 0.99999, 1],
    "tpot_slo_s": _SECONDS,
    "ttft_slo_s": _SECONDS,
    "speculative": ["auto", "off", "on", *_COUNTS],
    "max_num_seqs": [1],
}
"""Key a field; value what it may be set to, beside what is wrong for most."""


def change_settings(server: ServerProcess, seed: int) -> tuple[str, Counter[str]]:
    """Change settings several times under a stream, which must come to its end.

    Raises:
        UnexpectedAnswerError: an answer of 500 or more, or one that its client cannot read.
    """
    rng, told = random.Random(seed), Counter[str]()
    before = server.http.get("/settings").json()["asked"]
    request = long_request(max_tokens=_NUM_TOKENS, seed=seed)
    with connect(server) as sock:
        sock.sendall(post("/v1/completions", request, "Connection: close\r\n"))
        for _ in range(rng.randint(1, 6)):
            response = server.http.patch(
                "/settings",
                content=json.dumps(_random_patch(rng)),
                headers={"Content-Type": "application/json"},
            )
            check(response.status_code, response.content, "application/json")
            told[str(response.status_code)] += 1
            server.http.get("/settings").raise_for_status()
        # Those beside it may have been promised so little that this one would wait for them.
        server.http.patch("/settings", json=before).raise_for_status()
        status = answer(sock)
    if status not in (str(HTTPStatus.OK.value), str(HTTPStatus.TOO_MANY_REQUESTS.value)):
        raise UnexpectedAnswerError(f"the stream was answered with {status}")
    return "settings", told


def _random_patch(rng: random.Random) -> dict[str, Any]:
    names = rng.sample(list(_VALUES), rng.choice([1, 1, 1, 2, 3]))
    return {
        name: rng.choice(_WRONG if rng.random() < 0.2 else [*_VALUES[name], None]) for name in names
    }
