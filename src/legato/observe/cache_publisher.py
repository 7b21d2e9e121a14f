"""Publishes events of the cache over ZeroMQ, in vLLM's format, for routers that read it.

A message is a topic, the batch's number as 8 bytes, and the batch as MessagePack. A new subscriber
gets the whole cache, then its changes. A subscriber that misses a number asks the replay endpoint
for it; if that batch is no longer kept, the whole cache is published again.

Import this module only when needed: ZeroMQ is an optional package.
"""

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from queue import SimpleQueue

import msgspec
import zmq

from legato.core.errors import ConfigError
from legato.core.kv_events import BlockStored, KVEvent, KVEventBatch
from legato.observe.cache_mirror import CacheMirror

logger = logging.getLogger(__name__)

_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_TELL_ANEW_EVERY_S = 1.0
_WAKE = "inproc://wake"
_SUBSCRIBED = 1  # first byte of a subscription message
_MAX_REQUEST_BYTES = 1024

_MAX_EVENTS = 1024
"""Most events of a batch: vllm-router rejects four times as many, and forgets all it knew."""
_MAX_TOKENS = 2**20
"""A batch ends here: as MessagePack, at most 7 MB with the blocks' hashes; the router takes 16."""

MAX_BATCHES = 4096
_MAX_BYTES = 64 * 2**20


class CachePublisher:
    """Owns a thread with the sockets; `publish` only hands events to it.

    Args:
        endpoint: where to publish, such as tcp://127.0.0.1:5557; port * takes a free one.
        replay_endpoint: where subscribers ask for missed batches; None for no such endpoint.
        topic: the first part of each message.

    Attributes:
        endpoint, replay_endpoint: the addresses after binding.

    Raises:
        ConfigError: an endpoint cannot be used.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str) -> None:
        self._topic = topic.encode()
        self._is_to_tell_anew = False
        self._told_anew_s = -math.inf
        self._encoder = msgspec.msgpack.Encoder()
        self._mirror = CacheMirror()
        self._buffer = ReplayBuffer()
        self._waiting: SimpleQueue[Sequence[KVEvent] | None] = SimpleQueue()
        self._context = zmq.Context()
        try:
            self._subscribers = self._bound(zmq.XPUB, endpoint)
            # Without it, ZeroMQ hides a second subscription to the same topic.
            self._subscribers.setsockopt(zmq.XPUB_VERBOSE, 1)
            self._replay = (
                None if replay_endpoint is None else self._bound(zmq.ROUTER, replay_endpoint)
            )
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = _address(self._subscribers)
        self.replay_endpoint = None if self._replay is None else _address(self._replay)
        self._woken = self._context.socket(zmq.PULL)
        self._woken.bind(_WAKE)
        self._wake = self._context.socket(zmq.PUSH)
        self._wake.connect(_WAKE)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Publish events that belong together. Only the thread that made this may call it."""
        self._hand_over(events)

    def close(self) -> None:
        """Publish the waiting events and end; later events are dropped."""
        self._hand_over(None)
        self._thread.join()
        self._wake.close(linger=0)
        self._context.term()

    def _hand_over(self, events: Sequence[KVEvent] | None) -> None:
        if self._wake.closed:
            return
        self._waiting.put(events)
        with contextlib.suppress(zmq.Again):  # the thread is already awake
            self._wake.send(b"", zmq.DONTWAIT)

    def _bound(self, kind: int, endpoint: str) -> "zmq.Socket[bytes]":
        bound = self._context.socket(kind)
        bound.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        bound.setsockopt(zmq.SNDHWM, 2 * MAX_BATCHES)  # room for a replay
        bound.setsockopt(zmq.LINGER, 0)
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot tell of the cache at {endpoint}: {error}") from error
        return bound

    def _run(self) -> None:
        poller = zmq.Poller()
        for polled in (self._woken, self._subscribers, self._replay):
            if polled is not None:
                poller.register(polled, zmq.POLLIN)
        is_open = True
        while is_open:
            ready = dict(poller.poll(self._wait_ms))
            if self._subscribers in ready:
                self._take_subscription(self._subscribers.recv())
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay.recv_multipart())
            if self._woken in ready:
                self._woken.recv()
                is_open = self._publish_waiting()
            if self._wait_ms == 0:
                self._tell_anew()
        for polled in (self._woken, self._subscribers, self._replay):
            if polled is not None:
                polled.close()

    @property
    def _wait_ms(self) -> float | None:
        """Milliseconds until the whole cache is due again; None if it is not due."""
        if not self._is_to_tell_anew:
            return None
        return max(0.0, self._told_anew_s + _TELL_ANEW_EVERY_S - time.monotonic()) * 1000

    def _take_subscription(self, message: bytes) -> None:
        if message[:1] == bytes((_SUBSCRIBED,)) and self._topic.startswith(message[1:]):
            self._is_to_tell_anew = True

    def _publish_waiting(self) -> bool:
        """Publish waiting events; return False once the publisher is closed."""
        while not self._waiting.empty():
            events = self._waiting.get()
            if events is None:
                return False
            self._send([told for event in events for told in self._mirror.note(event)])
        return True

    def _tell_anew(self) -> None:
        self._send(self._mirror.snapshot())
        self._is_to_tell_anew = False
        self._told_anew_s = time.monotonic()

    def _send(self, events: Iterable[KVEvent]) -> None:
        now = time.time()
        for batch in batches(events):
            payload = self._encoder.encode(KVEventBatch(ts=now, events=batch))
            number = self._buffer.add(payload)
            self._subscribers.send_multipart(self._message(number, payload))

    def _answer(self, request: list[bytes]) -> None:
        """Send the requested batches and an end marker; ignore malformed requests."""
        assert self._replay is not None
        client, *delimiter, number = request
        if len(number) != _NUMBER_BYTES or any(delimiter):
            logger.debug("not a request for a replay: %r", request)
            return
        wanted = int.from_bytes(number, "big")
        self._is_to_tell_anew |= wanted < self._buffer.first_number
        head = [client, *delimiter]
        for kept, payload in self._buffer.since(wanted):
            self._replay.send_multipart([*head, *self._message(kept, payload)])
        self._replay.send_multipart([*head, b"", _END, b""])

    def _message(self, number: int, payload: bytes) -> list[bytes]:
        return [self._topic, number.to_bytes(_NUMBER_BYTES, "big"), payload]


def _address(bound: "zmq.Socket[bytes]") -> str:
    address: bytes = bound.getsockopt(zmq.LAST_ENDPOINT)
    return address.rstrip(b"\0").decode()


def batches(events: Iterable[KVEvent]) -> Iterator[list[KVEvent]]:
    """Split events into non-empty batches that every subscriber accepts, in order."""
    batch: list[KVEvent] = []
    num_tokens = 0
    for event in events:
        batch.append(event)
        num_tokens += len(event.token_ids) if isinstance(event, BlockStored) else 0
        if len(batch) == _MAX_EVENTS or num_tokens >= _MAX_TOKENS:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch


class ReplayBuffer:
    """The latest batches, for subscribers that missed some; the oldest are dropped first.

    They are numbered consecutively.

    Attributes:
        next_number: number of the next batch, from 0.
    """

    def __init__(self, max_batches: int = MAX_BATCHES, max_bytes: int = _MAX_BYTES) -> None:
        self.next_number = 0
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._kept: deque[bytes] = deque()
        self._num_bytes = 0

    @property
    def first_number(self) -> int:
        """Number of the oldest kept batch; of the next batch if none is kept."""
        return self.next_number - len(self._kept)

    def add(self, payload: bytes) -> int:
        """Keep a batch; return its number."""
        self._kept.append(payload)
        self._num_bytes += len(payload)
        while len(self._kept) > self._max_batches or self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._kept.popleft())
        self.next_number += 1
        return self.next_number - 1

    def since(self, number: int) -> Iterator[tuple[int, bytes]]:
        """Yield the kept batches from `number` on, each after its own number."""
        for kept, payload in enumerate(self._kept, self.first_number):
            if kept >= number:
                yield kept, payload
