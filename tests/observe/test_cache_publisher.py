"""What a router hears of a cache over ZeroMQ."""

import random
from collections.abc import Iterator

import msgspec
import pytest

from legato.core.errors import ConfigError
from legato.core.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    HitEnds,
    KVEvent,
    KVEventBatch,
)
from tests.kv.cache_watcher import CacheWatcher
from tests.observe.cached_prompt import NAMES, PROMPT, SIZE, stored

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
from legato.observe.cache_publisher import (  # noqa: E402 (it needs zmq)
    CachePublisher,
    ReplayBuffer,
    batches,
)

pytestmark = pytest.mark.fleet

TOPIC = "kv@a"
PATIENCE_MS = 20_000
END = b"\xff" * 8


@pytest.fixture
def publisher() -> Iterator[CachePublisher]:
    publisher = CachePublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", TOPIC)
    yield publisher
    publisher.close()


class Subscriber:
    """A router's end: each number and batch that has come, as it was sent."""

    def __init__(self, endpoint: str, kind: int = zmq.SUB) -> None:
        self.socket = zmq.Context.instance().socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        if kind == zmq.SUB:
            self.socket.setsockopt(zmq.SUBSCRIBE, TOPIC.encode())
        self.socket.connect(endpoint)

    def take(self) -> tuple[int, bytes]:
        topic, number, payload = self.socket.recv_multipart()
        assert topic == TOPIC.encode()
        return int.from_bytes(number, "big"), payload

    def events(self) -> list[KVEvent]:
        return list(msgspec.msgpack.decode(self.take()[1], type=KVEventBatch).events)


def test_messages_are_as_vllm_sends_them(publisher: CachePublisher) -> None:
    subscriber = Subscriber(publisher.endpoint)
    assert subscriber.events() == [AllBlocksCleared()]
    publisher.publish([stored(0, 1), stored(1, 3), BlockRemoved(block_hashes=[NAMES[2]])])
    number, payload = subscriber.take()
    assert number == 1
    time_s, events, rank = msgspec.msgpack.decode(payload)
    assert time_s > 1e9
    assert rank == 0
    assert events == [
        {
            "type": "BlockStored", "block_hashes": NAMES[:1], "parent_block_hash": None,
            "token_ids": PROMPT[:4], "block_size": SIZE, "lora_id": None, "medium": "GPU",
            "lora_name": None,
        },
        {
            "type": "BlockStored", "block_hashes": NAMES[1:], "parent_block_hash": NAMES[0],
            "token_ids": PROMPT[4:], "block_size": SIZE, "lora_id": None, "medium": "GPU",
            "lora_name": None,
        },
        {"type": "BlockRemoved", "block_hashes": [NAMES[2]], "medium": "GPU"},
    ]  # fmt: skip


def test_who_comes_later_is_told_all_that_is_there(publisher: CachePublisher) -> None:
    publisher.publish([AllBlocksCleared(), stored()])
    subscribers = []
    for _ in range(2):  # of the same topic, too
        subscribers.append(Subscriber(publisher.endpoint))
        watcher = CacheWatcher()
        watcher.take(subscribers[-1].events())
        assert watcher.hashes == {*NAMES}


def test_all_is_told_anew_once_to_those_alone_who_hear_it(publisher: CachePublisher) -> None:
    subscriber = Subscriber(publisher.endpoint)
    assert subscriber.events() == [AllBlocksCleared()]
    elsewhere = zmq.Context.instance().socket(zmq.SUB)
    elsewhere.setsockopt(zmq.SUBSCRIBE, b"another topic")
    elsewhere.connect(publisher.endpoint)
    assert not subscriber.socket.poll(1500), "it would be told each second"
    elsewhere.close(linger=0)


def test_what_is_not_kept_any_more_is_told_anew(publisher: CachePublisher) -> None:
    """Rather than sent again."""
    subscriber = Subscriber(publisher.endpoint)
    subscriber.take()
    publisher._buffer = ReplayBuffer(max_batches=1)
    for event in (stored(0, 1), stored(1, 3)):
        publisher.publish([event])
        subscriber.take()
    assert publisher.replay_endpoint is not None
    asking = Subscriber(publisher.replay_endpoint, zmq.DEALER).socket
    asking.send_multipart([b"", (0).to_bytes(8, "big")])
    assert subscriber.events()[0] == AllBlocksCleared()


def test_what_was_missed_is_sent_again(publisher: CachePublisher) -> None:
    subscriber = Subscriber(publisher.endpoint)
    subscriber.take()
    sent = []
    for event in (stored(0, 1), stored(1, 2), stored(2, 3)):
        publisher.publish([event])
        sent.append(subscriber.take())
    assert publisher.replay_endpoint is not None
    too_much = Subscriber(publisher.replay_endpoint, zmq.DEALER).socket
    too_much.send_multipart([b"x" * 2000])  # which ends a connection, and no other
    asking = Subscriber(publisher.replay_endpoint, zmq.DEALER).socket
    for nonsense in ([b""], [b"", b"12"], [b"what", (0).to_bytes(8, "big")]):
        asking.send_multipart(nonsense)  # which is not answered
    asking.send_multipart([b"", (2).to_bytes(8, "big")])
    for number, payload in sent[1:]:
        again = [b"", TOPIC.encode(), number.to_bytes(8, "big"), payload]
        assert asking.recv_multipart() == again
    assert asking.recv_multipart() == [b"", b"", END, b""]


def test_what_is_no_message_of_a_router_ends_nothing(publisher: CachePublisher) -> None:
    rng = random.Random(0)
    assert publisher.replay_endpoint is not None
    speaking = Subscriber(publisher.endpoint, zmq.XSUB).socket
    asking = Subscriber(publisher.replay_endpoint, zmq.DEALER).socket
    for _ in range(300):
        parts = [rng.randbytes(rng.randrange(12)) for _ in range(rng.randrange(1, 4))]
        speaking.send(b"".join(parts))
        asking.send_multipart(parts)
    publisher.publish([stored()])
    watcher = CacheWatcher()
    subscriber = Subscriber(publisher.endpoint)
    while watcher.hashes != {*NAMES}:
        watcher.take(subscriber.events())


def test_a_bad_endpoint_is_refused(publisher: CachePublisher) -> None:
    for endpoint, replay in ((publisher.endpoint, None), ("tcp://127.0.0.1:*", publisher.endpoint)):
        with pytest.raises(ConfigError, match="in use"):
            CachePublisher(endpoint, replay, TOPIC)


def test_the_oldest_batches_are_not_kept() -> None:
    buffer = ReplayBuffer(max_batches=3, max_bytes=10)
    for i in range(5):
        assert buffer.add(bytes([i])) == i
    assert [number for number, _ in buffer.since(0)] == [2, 3, 4]
    assert list(buffer.since(4)) == [(4, b"\4")]
    buffer.add(b"x" * 9)
    assert buffer.first_number == 4
    buffer.add(b"x" * 11)
    assert buffer.first_number == buffer.next_number == 7


def test_batches_are_small_enough_for_a_router() -> None:
    removed: list[KVEvent] = [BlockRemoved(block_hashes=[NAMES[0]])] * 2500
    assert [len(batch) for batch in batches(removed)] == [1024, 1024, 452]
    long = msgspec.structs.replace(stored(), token_ids=[1] * 700_000)
    assert [len(batch) for batch in batches([long] * 5)] == [2, 2, 1]
    assert list(batches([])) == []


def test_what_routers_of_other_projects_cannot_read_is_not_sent(publisher: CachePublisher) -> None:
    subscriber = Subscriber(publisher.endpoint)
    assert subscriber.events() == [AllBlocksCleared()]
    ends = [HitEnds(), HitEnds(added=[NAMES[1]]), HitEnds(removed=[NAMES[1]])]
    publisher.publish([AllBlocksCleared(), ends[0], stored(), *ends[1:]])
    gone = BlockRemoved(block_hashes=NAMES[1::-1])
    assert subscriber.events() == [AllBlocksCleared(), stored(0, 2), gone]
