import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.request import AbortRequest, AddRequest, Event
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.engine.process.channel import Channel, ChannelClosedError, FrameDecoder, pack_frame

MESSAGES: list[Event] = [
    AbortRequest(request_id="a"),
    AddRequest(
        request_id="ü",
        prompt_token_ids=token_array(range(9000)),
        params=SamplingParams(logit_bias={5: 1.0}, stop=("x",), seed=-1),
    ),
    AbortRequest(request_id=""),
]


@given(st.lists(st.integers(1, 40_000), max_size=20))
def test_frames_survive_any_cut(cuts: list[int]) -> None:
    data = b"".join(map(pack_frame, MESSAGES))
    frames = FrameDecoder(Event)
    received, start = [], 0
    for cut in [*cuts, len(data)]:
        received += frames.feed(data[start : start + cut])
        start += cut
    received += frames.feed(data[start:])
    assert received == MESSAGES


def test_an_idle_channel_does_not_wait_between_steps() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs, Event)
    assert channel.receive(wait_s=0.0) == []
    ours.sendall(pack_frame(MESSAGES[0]))
    assert channel.receive(wait_s=None) == [MESSAGES[0]]


def test_a_closed_channel_says_so() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs, Event)
    ours.close()
    with pytest.raises(ChannelClosedError):
        channel.receive(wait_s=0.0)
    with pytest.raises(ChannelClosedError):
        channel.send(MESSAGES[0])


def test_what_came_before_the_end_is_not_lost() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs, Event)
    ours.sendall(pack_frame(MESSAGES[0]))
    ours.close()
    assert channel.receive(wait_s=None) == [MESSAGES[0]]
    with pytest.raises(ChannelClosedError):
        channel.receive(wait_s=None)
