"""Frames of msgpack over a socket pair, which only the two processes at its ends can reach.

A frame is its length as 4 bytes, little-endian, and that many bytes of msgpack. Nothing is pickled.
Token ids are sent as they are in memory.
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
"""Longest time of reading messages in one turn, if more and more come."""


class ChannelClosedError(Exception):
    """The other end is gone."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """To a process: answer when idle."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Ping`."""


def pack(message: Any) -> bytes:
    """Return the body of a frame."""
    return msgspec.msgpack.encode(message, enc_hook=_encode_tokens)


def unpacker(message_type: Any) -> "msgspec.msgpack.Decoder[Any]":
    """Return a decoder of bodies; it raises `msgspec.ValidationError` or `ValueError`."""
    return msgspec.msgpack.Decoder(message_type, dec_hook=_decode_tokens)


def pack_frame(message: Any) -> bytes:
    """Return a whole frame."""
    body = pack(message)
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Assembles frames from pieces of any size."""

    def __init__(self, message_type: Any) -> None:
        self._decoder = unpacker(message_type)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Take bytes, and return the messages that they complete."""
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
    """The engine's end: it waits for messages while idle, and polls for them between steps."""

    def __init__(self, sock: socket.socket, message_type: Any) -> None:
        self._socket = sock
        self._frames = FrameDecoder(message_type)

    def send(self, message: Any) -> None:
        """Send a message; raises `ChannelClosedError` if the other end is gone."""
        self.send_frame(pack_frame(message))

    def send_frame(self, frame: bytes) -> None:
        """Send a packed message; raises `ChannelClosedError` likewise."""
        try:
            self._socket.sendall(frame)
        except OSError as error:
            raise ChannelClosedError from error

    def receive(self, *, wait_s: float | None) -> list[Any]:
        """Return the messages that have arrived, those of one turn at most.

        Args:
            wait_s: time to wait for the first message; None for no limit.

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
                break  # messages before the end are not lost; the next call raises
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
    """Call `act` once, in a thread of its own, when the other end of any socket closes."""
    # Copies stay valid when the sockets are closed here.
    copies = [os.dup(sock.fileno()) for sock in sockets]
    args = (copies, act)
    threading.Thread(target=_await_hang_up, args=args, name="hang-up", daemon=True).start()


def _await_hang_up(fds: list[int], act: Callable[[], None]) -> None:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, 0)  # a hang-up is always reported
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
