"""However much a request asks for, its answer is made little by little, and has its bounds."""

import asyncio
import json
import math
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType
from starlette.types import Message, Scope

from legato.api.answer import most_unread
from legato.api.bodies.answer_size import output_token_bytes, prompt_token_bytes
from legato.api.http import outlet
from legato.api.http.json_text import Kept, array, encode_json, in_pieces, json_pieces, listed
from legato.api.http.outlet import PacedResponse, Turns
from legato.api.limits import MAX_UNREAD_BYTES, MAX_WHOLE_ANSWER_BYTES
from legato.api.openai.logprobs import (
    CompletionLogprobsWriter,
    LogprobColumns,
    LogprobsWriter,
)
from legato.core.outputs import RequestOutput, TokenLogprobs, TokenScores, entries_of
from legato.core.sampling_params import SamplingParams
from legato.core.stats import EngineStats
from legato.core.vocabulary import Vocabulary
from legato.engine.process.channel import pack, unpacker
from legato.engine.process.engine_messages import FromEngine, StepOutputs
from tests.api.launch import ServerProcess
from tests.api.wire import connect, post

_TOKENS = (b"a", b" b", b"\xf0\x9f", b"\x98\x80", b"", b'"', b"\n", b"<s>", b"a")
VOCABULARY = Vocabulary.of(_TOKENS, frozenset({7}))

_token_ids = st.integers(0, len(_TOKENS) - 1)
_logprobs = st.one_of(st.just(-float("inf")), st.floats(-100, 0, width=32))


@st.composite
def _entries(draw: st.DrawFn, num_top: int, most: int = 6) -> list[TokenLogprobs]:
    pairs = st.lists(st.tuples(_token_ids, _logprobs), min_size=num_top, max_size=num_top)
    entry = st.builds(TokenLogprobs, _token_ids, _logprobs, st.integers(1, 9), pairs.map(tuple))
    return draw(st.lists(entry, max_size=most))


# Scores, as they lie in memory


@given(st.integers(0, 3).flatmap(lambda n: st.lists(_entries(n), min_size=1, max_size=3)))
def test_scores_are_what_they_were_made_of_on_the_other_side(
    parts: list[list[TokenLogprobs]],
) -> None:
    scores = [TokenScores.of(part) for part in parts if part]
    entries = [entry for part in parts for entry in part]
    assert list(entries_of(scores)) == entries
    if not scores:
        return
    joined = TokenScores.joined(scores)
    assert len(joined) == len(entries)
    message = StepOutputs([RequestOutput(request_id="a", prompt_logprobs=joined)], EngineStats())
    received = unpacker(FromEngine).decode(pack(message))
    assert list(received.outputs[0].prompt_logprobs) == entries


def test_scores_take_eight_bytes_a_number_between_processes() -> None:
    entry = TokenLogprobs(5, -1.5, 3, tuple((i, -float(i)) for i in range(20)))
    scores = TokenScores.of([entry] * 1000)
    output = RequestOutput(request_id="a", prompt_logprobs=scores)
    assert len(pack(StepOutputs([output], EngineStats()))) < 1000 * (21 * 8 + 4) + 2000


# JSON in pieces


class _Inner(msgspec.Struct, tag_field="type", tag="inner"):
    texts: list[str]
    maybe: int | UnsetType = UNSET


class _Outer(msgspec.Struct):
    inner: _Inner | None
    several: list[_Inner]
    fields: dict[str, float]
    raw: Any


_inner = st.builds(_Inner, st.lists(st.text()), st.one_of(st.integers(0, 9), st.just(UNSET)))


@given(
    st.builds(
        _Outer,
        st.one_of(st.none(), _inner),
        st.lists(_inner),
        st.dictionaries(st.text(), st.floats(allow_nan=False)),
        st.just(msgspec.Raw(b"[1]")),
    )
)
def test_pieces_are_the_json_of_the_whole(value: _Outer) -> None:
    whole = msgspec.json.encode(value)
    assert b"".join(json_pieces(value)) == whole
    lazy = msgspec.structs.replace(
        value,
        several=listed(iter(value.several)),
        raw=array(Kept([b"1"])),
        inner=in_pieces(json_pieces(value.inner)),
    )
    assert b"".join(json_pieces(lazy)) == whole
    lazy.several, lazy.inner = listed(iter(value.several)), in_pieces(json_pieces(value.inner))
    lazy.raw = array([b"1"])
    assert encode_json(lazy) == whole


def test_what_is_kept_is_made_once_and_no_sooner_than_it_is_read() -> None:
    made: list[int] = []

    def pieces() -> Iterator[bytes]:
        for number in range(3):
            made.append(number)
            yield b"%d" % number

    kept = Kept(pieces())
    assert made == []
    assert [b"".join(kept) for _ in range(3)] == [b"012"] * 3
    assert made == [0, 1, 2]


# Log probabilities


@given(st.integers(0, 3).flatmap(lambda n: st.tuples(st.just(n), _entries(n), _entries(n))))
def test_what_is_echoed_is_the_same_beside_each_completion(
    drawn: tuple[int, list[TokenLogprobs], list[TokenLogprobs]],
) -> None:
    """Several completions of one prompt, and each alone."""
    num_top, prompt, output = drawn
    token_ids = [0, *(entry.token_id for entry in prompt)]
    scored = [TokenScores.of(prompt)] if prompt else []
    echoed = b"".join(_TOKENS[i] for i in token_ids).decode(errors="replace")

    def written(num_completions: int) -> list[dict[str, list[Any]]]:
        writer = CompletionLogprobsWriter(
            LogprobsWriter(VOCABULARY), num_top=num_top, skip_special_tokens=True
        )
        columns = writer.prompt_columns(token_ids, scored, echoed, ()).each(Kept)
        return [
            json.loads(encode_json(LogprobColumns.joined(columns, writer.columns_of_one(output))))
            for _ in range(num_completions)
        ]

    [alone] = written(1)
    assert written(3) == [alone] * 3
    all_entries = [*prompt, *output]
    texts = [_TOKENS[i].decode(errors="replace") for i in [0, *(e.token_id for e in all_entries)]]
    assert alone["tokens"] == texts
    assert alone["token_logprobs"] == [None, *(max(e.logprob, -9999.0) for e in all_entries)]
    for shown, entry in zip(alone["top_logprobs"][1:], all_entries, strict=True):
        pairs = [*reversed(entry.top), (entry.token_id, entry.logprob)]
        expected = {_TOKENS[i].decode(errors="replace"): max(v, -9999.0) for i, v in pairs}
        assert shown == expected
    assert alone["text_offset"] == sorted(alone["text_offset"])


@given(_entries(2))
def test_a_prompt_s_scores_are_keyed_by_token(entries: list[TokenLogprobs]) -> None:
    scored = [TokenScores.of(entries)] if entries else []
    shown = json.loads(encode_json(array(LogprobsWriter(VOCABULARY).prompt(scored))))
    assert shown[0] is None
    for position, entry in zip(shown[1:], entries, strict=True):
        assert set(position) == {str(i) for i in (entry.token_id, *(i for i, _ in entry.top))}
        own = position[str(entry.token_id)]
        assert own["logprob"] == max(entry.logprob, -9999.0)
        assert own["rank"] == entry.rank
        assert own["decoded_token"] == _TOKENS[entry.token_id].decode(errors="replace")


# Turns


def _numbered(made: list[int], count: int) -> Iterator[bytes]:
    for number in range(count):
        made.append(number)
        yield b"x" * 2**16


async def _answered(response: PacedResponse, sent: list[Message]) -> None:
    async def receive() -> Message:
        raise AssertionError("nothing is received")

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "http"}
    await response(scope, receive, send)


def test_in_a_turn_of_the_loop_one_piece_is_made_whichever_answer_s() -> None:
    async def run() -> None:
        turns = Turns()
        made: list[int] = []
        sent: list[list[Message]] = [[] for _ in range(5)]
        answers = [
            asyncio.create_task(_answered(PacedResponse(_numbered(made, 20), turns), messages))
            for messages in sent
        ]
        await asyncio.sleep(0)
        num_before = len(made)
        while not all(answer.done() for answer in answers):
            await asyncio.sleep(0)
            assert len(made) - num_before <= 1
            num_before = len(made)
        for messages in sent:
            assert sum(len(m.get("body", b"")) for m in messages) == 20 * 2**16
            assert [m.get("more_body") for m in messages][-1] is False

    asyncio.run(run())


def test_what_is_not_read_is_not_made() -> None:
    async def run() -> None:
        made: list[int] = []
        is_reading = asyncio.Event()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                await is_reading.wait()

        response = PacedResponse(_numbered(made, 100), Turns())
        answer = asyncio.create_task(response({"type": "http"}, None, send))  # type: ignore[arg-type]
        for _ in range(1000):
            await asyncio.sleep(0)
        assert len(made) <= 2
        is_reading.set()
        await answer
        assert len(made) == 100

    asyncio.run(run())


def test_an_answer_of_one_piece_tells_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet, "_SLICE_S", math.inf)  # a busy machine may cut it in two

    async def run() -> None:
        sent: list[Message] = []
        await _answered(PacedResponse([b"[", b"]"], Turns()), sent)
        headers = dict(sent[0]["headers"])
        assert headers[b"content-length"] == b"2"
        assert [m["body"] for m in sent[1:]] == [b"[]"]

    asyncio.run(run())


# Bounds


def test_an_answer_does_not_make_the_server_grow_by_its_size(server: ServerProcess) -> None:
    """Each of many completions shows the scores of a long prompt."""
    request = {"prompt": [8] * 500, "max_tokens": 1, "prompt_logprobs": 20, "n": 64}
    process = psutil.Process(server.process.pid)
    server.http.post("/v1/completions", json={**request, "n": 2})
    before, most, num_bytes = process.memory_info().rss, 0, 0
    with connect(server) as sock:
        sock.sendall(post("/v1/completions", request, "Connection: close\r\n"))
        while data := sock.recv(2**18):
            num_bytes += len(data)
            most = max(most, process.memory_info().rss)
    assert num_bytes > 40 * 2**20
    assert most - before < num_bytes / 4


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TOO_MUCH = [
    ("/v1/completions", {"prompt": [8] * 1200, "prompt_logprobs": 20, "n": 128}, "n"),
    ("/v1/completions", {"prompt": [[8] * 1000] * 80, "prompt_logprobs": 20}, "prompt_logprobs"),
    ("/v1/completions", {"prompt": [8] * 1500, "echo": True, "logprobs": 20, "n": 128}, "n"),
    ("/v1/completions", {"prompt": [8], "max_tokens": 1500, "logprobs": 20, "n": 128}, "n"),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 20, "n": 128}, "n"),
]


@pytest.mark.parametrize(("path", "body", "param"), TOO_MUCH)
def test_an_answer_that_may_be_too_large_is_refused(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    error = http.post(path, json=body).json()["error"]
    assert error["param"] == param
    assert f"over {MAX_WHOLE_ANSWER_BYTES >> 20}" in error["message"]


def test_what_is_streamed_may_be_of_any_size(server: ServerProcess) -> None:
    request = {**CHAT, "logprobs": True, "top_logprobs": 20, "n": 128, "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=request) as response:
        assert response.status_code == 200
    server.wait_for_metric("num_requests_running", 0)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_top", [0, 5, 20])
def test_an_estimate_is_near_the_answer(http: httpx.Client, n: int, num_top: int) -> None:
    """Of ordinary tokens: neither less, nor several times as much."""
    text = "It was a bright cold day in April, and the clocks were striking thirteen. " * 8
    prompt = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    asked = {"prompt": prompt, "max_tokens": 8, "n": n, "ignore_eos": True, "temperature": 0.0}
    cases: list[tuple[dict[str, bool], dict[str, Any]]] = [
        ({"shows_prompt_logprobs": True}, {"prompt_logprobs": num_top}),
        ({"echoes": True}, {"echo": True, "logprobs": num_top}),
        (
            {"echoes": True, "returns_token_ids": True},
            {"echo": True, "logprobs": num_top, "return_token_ids": True},
        ),
    ]
    for shown, fields in cases:
        num_bytes = len(http.post("/v1/completions", json={**asked, **fields}).content)
        params = SamplingParams(
            logprobs=fields.get("logprobs"), prompt_logprobs=fields.get("prompt_logprobs")
        )
        has_ids = shown.get("returns_token_ids", False)
        output = output_token_bytes(params, is_chat=False, returns_token_ids=has_ids)
        estimate = n * (len(prompt) * prompt_token_bytes(params, **shown) + 8 * output)
        assert estimate * 0.5 <= num_bytes <= estimate * 1.2 + 1000


def test_what_waits_for_a_slow_reader_is_bounded_in_bytes() -> None:
    assert most_unread(SamplingParams(), 1, 2048) == 2048
    most = most_unread(SamplingParams(logprobs=20, n=128), 128, 2048)
    assert most < 128 * 2048
    entry = TokenLogprobs(5, -1.5, 3, tuple((i, -float(i)) for i in range(20)))
    assert most * len(msgspec.json.encode(entry)) < MAX_UNREAD_BYTES
    assert most_unread(SamplingParams(logprobs=20, n=128), 10**6, 2048) == 10**6


def test_a_score_is_a_float32() -> None:
    [number] = struct.unpack("f", struct.pack("f", -1.1))
    scores = TokenScores.of([TokenLogprobs(5, -1.1, 1, ())])
    assert [entry.logprob for entry in scores] == [number]
