"""Frames of msgpack over a socket pair, which only the two processes that hold its ends can reach.

A frame is its length as 4 bytes, little-endian, and that many bytes of msgpack. Nothing is pickled.
Token ids go as they lie in memory.
"""

import math
import os
import select
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from legato.core.token_ids import TokenIds, token_array

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 17
_TURN_S = 0.001
"""How long messages are taken in, where more and more come; to do what they ask takes as long."""


class ChannelClosedError(Exception):
    """The other end is gone."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """To a process: answer, as soon as nothing else is to be done."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Ping`."""


def pack(message: Any) -> bytes:
    """The body of a frame."""
    return msgspec.msgpack.encode(message, enc_hook=_encode_tokens)


def unpacker(message_type: Any) -> "msgspec.msgpack.Decoder[Any]":
    """Decodes bodies; raises `msgspec.ValidationError` or `ValueError` for what is none."""
    return msgspec.msgpack.Decoder(message_type, dec_hook=_decode_tokens)


def pack_frame(message: Any) -> bytes:
    body = pack(message)
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Puts frames together from whatever pieces arrive."""

    def __init__(self, message_type: Any) -> None:
        self._decoder = unpacker(message_type)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Take bytes in and return the messages that they complete."""
        self._buffer += data
        messages: list[Any] = []
        offset = 0
        while len(self._buffer) - offset >= _LENGTH.size:
            body = offset + _LENGTH.size
            end = body + _LENGTH.unpack_from(self._buffer, offset)[0]
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(memoryview(self._buffer)[body:end]))
            offset = end
        del self._buffer[:offset]
        return messages


class Channel:
    """The engine's end: it waits for messages while idle, and only looks for them between steps."""

    def __init__(self, sock: socket.socket, message_type: Any) -> None:
        self._socket = sock
        self._frames = FrameDecoder(message_type)

    def send(self, message: Any) -> None:
        """Raises `ChannelClosedError` if nobody listens any more."""
        self.send_frame(pack_frame(message))

    def send_frame(self, frame: bytes) -> None:
        """The same with a frame that was made before."""
        try:
            self._socket.sendall(frame)
        except OSError as error:
            raise ChannelClosedError from error

    def receive(self, *, wait_s: float | None) -> list[Any]:
        """Messages that have arrived, as many as one turn holds.

        Args:
            wait_s: for the first of them; None waits until there is one.

        Raises:
            ChannelClosedError: the other end was closed.
        """
        messages: list[Any] = []
        ends_s = math.inf
        while not messages or time.monotonic() < ends_s:
            readable, _, _ = select.select([self._socket], [], [], 0 if messages else wait_s)
            if not readable:
                break
            ends_s = min(ends_s, time.monotonic() + _TURN_S)
            try:
                messages += self._frames.feed(self._read())
            except ChannelClosedError:
                if not messages:
                    raise
                break  # what came before is not lost; the next call tells of the end
        return messages

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(_READ_BYTES)
        except OSError as error:
            raise ChannelClosedError from error
        if not data:
            raise ChannelClosedError
        return data


def on_hang_up(sockets: Iterable[socket.socket], act: Callable[[], None]) -> None:
    """Have `act` called by a thread of its own, once, when the first of them has no other end."""
    # Of its own, so that they stay what they are when the sockets are closed here.
    copies = [os.dup(sock.fileno()) for sock in sockets]
    args = (copies, act)
    threading.Thread(target=_await_hang_up, args=args, name="hang-up", daemon=True).start()


def _await_hang_up(fds: list[int], act: Callable[[], None]) -> None:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, 0)  # hanging up is always told
    poller.poll()
    act()
    for fd in fds:
        os.close(fd)


def _encode_tokens(value: Any) -> bytes:
    if not isinstance(value, array):
        raise NotImplementedError(f"{type(value)} goes into no frame")
    return value.tobytes()


def _decode_tokens(_: type, data: bytes) -> TokenIds:
    token_ids = token_array(())
    token_ids.frombytes(data)
    return token_ids
