"""Single clients, and how their requests end."""

import asyncio
import enum
from http import HTTPStatus
from typing import Any

import httpx
import msgspec

from benchmarks.soak.cases import Case

_PATIENCE_S = 180.0
"""After which a request that has not ended hangs."""
_DONE = "[DONE]"
BAD_REQUEST = "bad request"
ENGINE_DEAD = "engine_dead"

MALFORMED: list[bytes] = [
    b'{"prompt": "Once", ',
    b"[]",
    b"{}",
    b'{"prompt": 5}',
    b'{"prompt": ""}',
    b'{"prompt": [-1]}',
    b'{"prompt": [1, 99999999]}',
    b'{"prompt": "Once", "max_tokens": 0}',
    b'{"prompt": "Once", "max_tokens": 1000000}',
    b'{"prompt": "Once", "temperature": "hot"}',
    b'{"prompt": "Once", "top_p": 7}',
    b'{"prompt": "Once", "unheard_of": 1}',
    b'{"prompt": "Once", "logit_bias": {"99999999": 1}}',
    b'{"prompt": "\xff"}',
]
"""Bodies that are to be answered with 400."""


class End(enum.StrEnum):
    """How a request ended, as its client saw it. LOST is anything that must not be."""

    FINISHED = "finished"
    ABORTED = "aborted by its client"
    REFUSED = "refused"
    FAILED = "failed"
    LOST = "lost"


class Outcome(msgspec.Struct, frozen=True):
    """What became of a request.

    Attributes:
        text: of one that finished.
        detail: of one that ended otherwise: `BAD_REQUEST`, an error's code, or what went wrong.
    """

    end: End
    text: str = ""
    detail: str = ""


class LostError(Exception):
    """The answer is not one that a server may give."""


async def complete(http: httpx.AsyncClient, case: Case, *, stream: bool) -> Outcome:
    """Send a request and read its answer to the end."""
    body = {**case.request, "stream": stream}
    read = _read_stream if stream else _read_whole
    return await _ending(read(http, body))


async def leave(http: httpx.AsyncClient, case: Case, after_s: float) -> Outcome:
    """The same, but go away if it has not ended by then."""
    try:
        async with asyncio.timeout(after_s):
            return await complete(http, case, stream=True)
    except TimeoutError:
        return Outcome(End.ABORTED)


async def send_malformed(http: httpx.AsyncClient, body: bytes) -> Outcome:
    return await _ending(_post_malformed(http, body))


async def _ending(answer: Any) -> Outcome:
    try:
        return await asyncio.wait_for(answer, _PATIENCE_S)
    except (LostError, httpx.HTTPError) as error:
        return Outcome(End.LOST, detail=f"{type(error).__name__}: {error}")
    except TimeoutError:
        return Outcome(End.LOST, detail=f"no end within {_PATIENCE_S:.0f} s")


async def _read_whole(http: httpx.AsyncClient, body: dict[str, Any]) -> Outcome:
    response = await http.post("/v1/completions", json=body)
    if response.status_code != HTTPStatus.OK:
        return _not_served(response)
    [choice] = response.json()["choices"]
    return Outcome(End.FINISHED, text=choice["text"])


async def _read_stream(http: httpx.AsyncClient, body: dict[str, Any]) -> Outcome:
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != HTTPStatus.OK:
            await response.aread()
            return _not_served(response)
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    if not lines or lines.pop() != _DONE:
        raise LostError("the stream broke off")
    events = [msgspec.json.decode(line) for line in lines]
    if "error" in events[-1]:
        return Outcome(End.FAILED, detail=_error_code(events[-1]))
    choices = [event["choices"][0] for event in events]
    ends = [choice["finish_reason"] for choice in choices]
    if ends[-1] is None or any(ends[:-1]):
        raise LostError(f"the stream ends with {ends[-3:]}")
    return Outcome(End.FINISHED, text="".join(choice["text"] for choice in choices))


async def _post_malformed(http: httpx.AsyncClient, body: bytes) -> Outcome:
    headers = {"Content-Type": "application/json"}
    outcome = _not_served(await http.post("/v1/completions", content=body, headers=headers))
    if outcome.detail != BAD_REQUEST:
        raise LostError(f"{body!r} was answered with {outcome}")
    return outcome


def _not_served(response: httpx.Response) -> Outcome:
    code = _error_code(msgspec.json.decode(response.content))
    if response.status_code == HTTPStatus.TOO_MANY_REQUESTS:
        return Outcome(End.REFUSED, detail=code)
    is_bad = response.status_code == HTTPStatus.BAD_REQUEST
    return Outcome(End.FAILED, detail=BAD_REQUEST if is_bad else code)


def _error_code(body: Any) -> str:
    try:
        error = body["error"]
        return f"{error['code'] or error['message']}"
    except (KeyError, TypeError) as malformed:
        raise LostError(f"not an error of OpenAI's API: {body!r}") from malformed
