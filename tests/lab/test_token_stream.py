"""Reading the events of a stream, cut anywhere."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato_lab.load.token_stream import TokenStream
from legato_lab.simulation.record import RequestError

TOKEN = b'data: {"id":"x","choices":[{"index":0,"text":" a"}],"usage":null}\n\n'
SPACED = b'data:{"id": "x", "choices": [ { "text": "\\"choices\\":[" } ]}\r\n\r\n'
USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":%d}}\n\n'
DONE = b"data: [DONE]\n\n"


def read(*chunks: bytes) -> tuple[list[float], int]:
    """Times and count of tokens; chunk k comes at k."""
    times_s: list[float] = []
    stream = TokenStream(times_s)
    for index, chunk in enumerate(chunks):
        stream.feed(chunk, float(index))
    return times_s, stream.end()


def test_tokens_are_stamped_as_they_come() -> None:
    assert read(TOKEN, TOKEN + SPACED, USAGE % 3, DONE) == ([0.0, 1.0, 1.0], 3)


def test_without_usage_the_events_are_counted() -> None:
    assert read(TOKEN, TOKEN, DONE) == ([0.0, 1.0], 2)


def test_several_tokens_an_event() -> None:
    assert read(TOKEN, TOKEN, USAGE % 5 + DONE) == ([0.0, 1.0], 5)


SO_FAR = (
    b'data: {"choices":[{"index":0,"text":" \\"completion_tokens\\":9"}],'
    b'"usage":{"prompt_tokens":3,"completion_tokens":%d}}\n\n'
)


def test_tokens_of_an_event_are_counted_where_the_usage_so_far_is_told() -> None:
    times_s: list[float] = []
    counts: list[int] = []
    stream = TokenStream(times_s, counts)
    events = [SO_FAR % 1, SO_FAR % 5, SO_FAR % 5, SO_FAR % 7, USAGE % 7 + DONE]
    for index, event in enumerate(events):
        stream.feed(event, float(index))
    assert (times_s, counts) == ([0.0, 1.0, 3.0], [1, 4, 2])
    assert stream.end() == 7


def test_tokens_of_an_event_are_one_where_nothing_is_told() -> None:
    counts: list[int] = []
    stream = TokenStream([], counts)
    stream.feed(TOKEN + SPACED, 0.0)
    assert counts == [1, 1]


def test_last_event_without_a_token() -> None:
    assert read(TOKEN, TOKEN, TOKEN + USAGE % 2 + DONE) == ([0.0, 1.0], 2)


@pytest.mark.parametrize(
    ("usage", "num_cached"),
    [
        (b'"completion_tokens":1', None),
        (b'"completion_tokens":1,"prompt_tokens_details":null', None),
        (b'"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":null}', None),
        (b'"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":512}', 512),
    ],
)
def test_cached_tokens_are_known_where_the_server_tells(
    usage: bytes, num_cached: int | None
) -> None:
    stream = TokenStream([])
    stream.feed(TOKEN + b'data: {"choices":[],"usage":{' + usage + b"}}\n\n" + DONE, 0.0)
    assert stream.end() == 1
    assert stream.num_cached_tokens == num_cached


@given(st.lists(st.integers(0, 400)))
def test_chunks_may_end_anywhere(cuts: list[int]) -> None:
    text = b": ping\n\nevent: x\n" + TOKEN + SPACED + TOKEN + USAGE % 3 + DONE
    places = [0, *sorted(cuts), len(text)]
    chunks = [text[start:end] for start, end in itertools.pairwise(places)]
    times_s, num_tokens = read(*chunks)
    assert (len(times_s), num_tokens) == (3, 3)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ((TOKEN,), "broke off"),
        ((), "broke off"),
        ((DONE,), "no token"),
        ((TOKEN, b'data: {"error":{"message":"out of memory"}}\n\n', DONE), "out of memory"),
        ((TOKEN, b"data: <html>\n\n"), "<html>"),
    ],
)
def test_streams_that_fail(chunks: tuple[bytes, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read(*chunks)
