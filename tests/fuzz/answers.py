"""Clients that ask for much: long prompts, many completions, every log probability there is."""

import http.client
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec

from tests.api.launch import ServerProcess
from tests.api.wire import connect, post
from tests.fuzz.clients import UnexpectedAnswerError
from tests.fuzz.memory import watching_growth

FLAGS = ("--max-num-seqs", "16", "--max-waiting", "4096")
"""Steps that are short, however many completions one request asks for."""
MAX_GROWTH_BYTES = 128 * 2**20
"""Of any process of the server, while one answer is asked for: the most that an answer may have."""
_VOCAB_SIZE = 49152
_MOST_PROMPT_TOKENS, _MOST_OUTPUT_TOKENS = 3000, 256
"""Of all of a request's, so that it does not take minutes."""
_STAY_S = 20.0
_PARSED_BYTES = 4 * 2**20
"""Larger answers are only counted."""
_SIZES = {2**16: "small", 2**20: "of up to 1 MiB", 2**24: "of up to 16 MiB"}

Body = dict[str, Any]


def any_completion(rng: random.Random) -> tuple[str, Body]:
    num_prompts = rng.choice([1, 1, 1, 2, 8])
    length = _skewed(rng, _MOST_PROMPT_TOKENS // 2 // num_prompts)
    n = _skewed(rng, 128)
    is_streamed = rng.random() < 0.3
    max_tokens = _skewed(rng, max(1, _MOST_OUTPUT_TOKENS // n // num_prompts))
    body: Body = {
        "prompt": [_prompt(rng, length) for _ in range(num_prompts)],
        "max_tokens": max_tokens,
        "n": n,
        "stream": is_streamed,
        "ignore_eos": rng.random() < 0.5,
        "return_token_ids": rng.random() < 0.2,
        "logprobs": rng.choice([None, None, 0, 1, 5, 20]),
    }
    if is_streamed:
        body["echo"] = body["logprobs"] is None and rng.random() < 0.5
    else:
        body["echo"] = rng.random() < 0.4
        body["prompt_logprobs"] = rng.choice([None, None, 0, 1, 5, 20])
    return "/v1/completions", body


def any_chat(rng: random.Random) -> tuple[str, Body]:
    n = _skewed(rng, 128)
    is_streamed = rng.random() < 0.4
    body: Body = {
        "messages": [{"role": "user", "content": _text(rng, _MOST_PROMPT_TOKENS // 2)}],
        "max_tokens": _skewed(rng, max(1, _MOST_OUTPUT_TOKENS // n)),
        "n": n,
        "stream": is_streamed,
        "ignore_eos": rng.random() < 0.5,
        "return_token_ids": rng.random() < 0.2,
        "logprobs": rng.random() < 0.7,
    }
    if body["logprobs"]:
        body["top_logprobs"] = rng.choice([0, 1, 5, 20])
    if not is_streamed:
        body["prompt_logprobs"] = rng.choice([None, None, 0, 1, 5, 20])
    return "/v1/chat/completions", body


def any_response(rng: random.Random) -> tuple[str, Body]:
    has_logprobs = rng.random() < 0.7
    return "/v1/responses", {
        "input": _text(rng, _MOST_PROMPT_TOKENS // 2),
        "max_output_tokens": _skewed(rng, _MOST_OUTPUT_TOKENS),
        "stream": rng.random() < 0.5,
        "ignore_eos": rng.random() < 0.5,
        "store": rng.random() < 0.5,
        "background": rng.random() < 0.2,
        "include": ["message.output_text.logprobs"] if has_logprobs else [],
        "top_logprobs": rng.choice([0, 5, 20]) if has_logprobs else None,
    }


def any_message(rng: random.Random) -> tuple[str, Body]:
    return "/v1/messages", {
        "model": "any",
        "messages": [{"role": "user", "content": _text(rng, _MOST_PROMPT_TOKENS // 2)}],
        "max_tokens": _skewed(rng, _MOST_OUTPUT_TOKENS),
        "stream": rng.random() < 0.5,
    }


def any_tokens(rng: random.Random) -> tuple[str, Body]:
    n = _skewed(rng, 128)
    is_streamed = rng.random() < 0.4
    params: Body = {
        "n": n,
        "max_tokens": _skewed(rng, max(1, _MOST_OUTPUT_TOKENS // n)),
        "ignore_eos": rng.random() < 0.5,
        "logprobs": rng.choice([None, 0, 5, 20]),
    }
    if not is_streamed:
        params["prompt_logprobs"] = rng.choice([None, None, 0, 20])
    prompt = [rng.randrange(_VOCAB_SIZE) for _ in range(_skewed(rng, _MOST_PROMPT_TOKENS // 2))]
    return "/inference/v1/generate", {
        "token_ids": prompt,
        "sampling_params": {name: value for name, value in params.items() if value is not None},
        "output_mode": rng.choice(["tokens", "text"] if is_streamed else ["tokens", "derender"]),
        "return_token_ids": rng.random() < 0.5,
        "stream": is_streamed,
    }


def without_end(rng: random.Random) -> tuple[str, Body]:
    """One that asks for as much as its context holds; its client leaves when it has seen enough."""
    path, body = rng.choice([any_completion, any_chat])(rng)
    body |= {"n": 128, "max_tokens": None if "messages" in body else 1500, "ignore_eos": True}
    return path, body


REQUESTS: dict[Callable[[random.Random], tuple[str, Body]], float] = {
    any_completion: 0.4,
    any_tokens: 0.1,
    any_chat: 0.25,
    any_response: 0.12,
    any_message: 0.05,
    without_end: 0.08,
}
"""Value how often it comes."""


def ask(server: ServerProcess, seed: int) -> tuple[str, Counter[str]]:
    """Let one client ask.

    Returns:
        The kind of its request, and the status and size of its answer, or how it went away.

    Raises:
        UnexpectedAnswerError: an answer of 500 or more, one that is not what was asked for, or one
            for which a process grew by more than `MAX_GROWTH_BYTES`.
    """
    rng = random.Random(seed)
    (make,) = rng.choices(list(REQUESTS), list(REQUESTS.values()))
    path, body = make(rng)
    if path == "/v1/messages":
        body["model"] = server.http.get("/v1/models").json()["data"][0]["id"]
    body = {name: value for name, value in body.items() if value is not None}
    with watching_growth(server) as growth:
        told = _exchange(server, rng, path, body)
    for name, num_bytes in growth.items():
        if num_bytes > MAX_GROWTH_BYTES:
            raise UnexpectedAnswerError(f"{name} grew by {num_bytes >> 20} MiB over {told}")
    return make.__name__ + (" streamed" if body.get("stream") else ""), Counter([told])


def _exchange(server: ServerProcess, rng: random.Random, path: str, body: Body) -> str:
    with connect(server, receive_buffer_bytes=rng.choice([None, None, 4096])) as sock:
        sock.settimeout(_STAY_S)
        sock.sendall(post(path, body, "Connection: close\r\n"))
        try:
            status, data, num_bytes = _read(sock, pause_s=rng.choice([0, 0, 0, 0.001]))
        except TimeoutError:
            return "left"
        except (http.client.HTTPException, ConnectionError):
            return "disconnected"
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        raise UnexpectedAnswerError(f"{status}: {data[:1000]!r}")
    if status == HTTPStatus.OK and not body.get("stream") and num_bytes <= _PARSED_BYTES:
        _check(path, body, msgspec.json.decode(data))
    size = next((name for most, name in _SIZES.items() if num_bytes <= most), "of more")
    return f"{status} {size}"


def _read(sock: socket.socket, pause_s: float) -> tuple[int, bytes, int]:
    """Status, body as far as it is small, and length of an answer."""
    deadline_s = time.monotonic() + _STAY_S
    response = http.client.HTTPResponse(sock)
    response.begin()
    data, num_bytes = bytearray(), 0
    while piece := response.read(2**16):
        num_bytes += len(piece)
        if num_bytes <= _PARSED_BYTES:
            data += piece
        if time.monotonic() > deadline_s:
            raise TimeoutError
        time.sleep(pause_s)
    return response.status, bytes(data), num_bytes


def _check(path: str, body: Body, answer: Any) -> None:
    """Raises `UnexpectedAnswerError` where something is missing."""
    if path == "/v1/completions":
        prompts, n = body["prompt"], body["n"]
        expected = len(prompts) * n
        for choice in answer["choices"]:
            prompt = prompts[choice["index"] // n]
            first = answer["choices"][choice["index"] - choice["index"] % n]
            _expect(choice.get("prompt_logprobs") == first.get("prompt_logprobs"), answer)
            if "prompt_logprobs" in body:
                _expect(len(choice["prompt_logprobs"]) == len(prompt), answer)
            if body["echo"] and "logprobs" in body:
                lists = choice["logprobs"].values()
                _expect(len(set(map(len, lists))) == 1, answer)
                _expect(len(choice["logprobs"]["tokens"]) > len(prompt), answer)
    elif path == "/inference/v1/generate":
        expected = body["sampling_params"]["n"]
        scored = [choice for choice in answer["choices"] if choice["logprobs"] is not None]
        _expect(len(scored) == ("logprobs" in body["sampling_params"]) * expected, answer)
    elif path == "/v1/chat/completions":
        expected = body["n"]
        for choice in answer["choices"]:
            if body["logprobs"]:
                _expect(bool(choice["logprobs"]["content"]), answer)
    else:
        return
    indices = [choice["index"] for choice in answer["choices"]]
    _expect(indices == list(range(expected)), answer)


def _expect(condition: bool, answer: Any) -> None:
    if not condition:
        raise UnexpectedAnswerError(f"not what was asked for: {json.dumps(answer)[:1000]}")


def _skewed(rng: random.Random, most: int) -> int:
    """From 1 to `most`, and as likely small as large."""
    return max(1, min(most, round(most ** rng.random())))


def _prompt(rng: random.Random, length: int) -> list[int]:
    if rng.random() < 0.5:
        return [rng.randrange(_VOCAB_SIZE)] * length
    return [rng.randrange(_VOCAB_SIZE) for _ in range(length)]


def _text(rng: random.Random, most_tokens: int) -> str:
    word = rng.choice(["a ", "\U0001f600", "\n", '"\\', "\x01", "word "])
    return word * _skewed(rng, most_tokens // 4)
