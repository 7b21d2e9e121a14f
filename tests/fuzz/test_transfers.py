"""Engines that move blocks do not believe each other: what is broken ends a connection, no more."""

import asyncio
import ctypes
import random
import struct
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from legato.core.kv_transfer import FetchBlocks
from legato.transfer.block_memory import CacheMemory, Region
from legato.transfer.exports import Exports
from legato.transfer.fetch import Fetcher, Wanted
from legato.transfer.mover import TransferError
from legato.transfer.protocol import Ask, Challenge, Hello, new_nonce, proof
from legato.transfer.service import ExportService
from tests.fuzz.frames import broken
from tests.profiles import scaled
from tests.transfer.local_mover import LocalMover

KEY = b"sixteen bytes or more of it"
LAYOUT = {"--block-size": "32"}
DIGEST = b"d" * 32
NAME = "prompt"
_BLOCK_BYTES = 64
_NUM_BLOCKS = 8
_LENGTH = struct.Struct("<I")
_NUM_CONNECTIONS = scaled(75)


class Side:
    """Memory of an engine, and what moves it."""

    def __init__(self, name: str) -> None:
        self.bytes = bytearray(_NUM_BLOCKS * _BLOCK_BYTES)
        region = Region(
            address=ctypes.addressof(ctypes.c_char.from_buffer(self.bytes)),
            num_planes=1,
            num_blocks=_NUM_BLOCKS,
            block_bytes=_BLOCK_BYTES,
        )
        self.memory = CacheMemory(groups=((region,),))
        self.mover = LocalMover(name, self.memory)


async def received(reader: asyncio.StreamReader) -> bytes:
    [length] = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


def framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def kept() -> Exports:
    exports = Exports(lease_s=1.0)
    exports.begin(NAME, DIGEST)
    exports.grow(NAME, [1, 2, 3])
    return exports


@pytest.mark.endurance
async def test_an_engine_that_prefills_survives_who_asks(caplog: pytest.LogCaptureFixture) -> None:
    """A client without the key learns nothing, and the next client is served."""
    side, exports, rng = Side("exports"), kept(), random.Random(0)
    service = ExportService(exports, side.mover, side.memory, LAYOUT, KEY)
    server = await asyncio.start_server(service.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        for i in range(_NUM_CONNECTIONS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            challenge = msgspec.msgpack.decode(await received(reader), type=Challenge)
            hello = Hello(new_nonce(), proof(KEY, "fetch", challenge.nonce), LAYOUT)
            bodies = [msgspec.msgpack.encode(hello), msgspec.msgpack.encode(Ask(NAME, DIGEST, 0))]
            bodies[i % 2] = broken(rng, bodies[i % 2])
            frames = b"".join(map(framed, bodies))
            if rng.random() < 0.1:  # of a length that is none
                frames = _LENGTH.pack(rng.randrange(2**32)) + frames
            writer.write(frames)
            writer.write_eof()
            with suppress(EOFError, ConnectionError):
                while True:
                    async with asyncio.timeout(20):
                        await received(reader)
            writer.close()
        into = Side("fetches")
        side.bytes[_BLOCK_BYTES : 4 * _BLOCK_BYTES] = b"k" * (3 * _BLOCK_BYTES)
        exports.begin("after", DIGEST)
        exports.grow("after", [1, 2, 3])
        exports.complete("after")
        await Fetcher(into.mover, into.memory, LAYOUT, KEY, patience_s=20).fetch(
            wanted("after", port)
        )
        assert bytes(into.bytes[: 3 * _BLOCK_BYTES]) == b"k" * (3 * _BLOCK_BYTES)
        assert not caplog.records
        while service._num_connections:
            await asyncio.sleep(0.01)
    finally:
        server.close()


def wanted(name: str, port: int) -> Wanted:
    source = FetchBlocks(name, "127.0.0.1", port)
    return Wanted(source, DIGEST, [0, 1, 2], 0, lambda _: None)


@pytest.mark.endurance
async def test_an_engine_that_decodes_survives_whom_it_asks() -> None:
    """What it is told fails with a `TransferError` or not at all, and is written nowhere else."""
    side, into, rng = Side("lies"), Side("believes"), random.Random(0)
    side.bytes[:] = b"k" * len(side.bytes)

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        service = ExportService(exports, side.mover, side.memory, LAYOUT, KEY)
        place = rng.randrange(4)

        class Broken:
            """Passes on what the service sends, but for one message."""

            num_sent = 0

            def write(self, data: bytes) -> None:
                self.num_sent += 1
                is_lie = self.num_sent == place + 1
                writer.write(framed(broken(rng, data[_LENGTH.size :])) if is_lie else data)

            def __getattr__(self, name: str) -> Any:
                return getattr(writer, name)

        await service.serve(reader, Broken())  # type: ignore[arg-type]

    server = await asyncio.start_server(lie, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    fetcher = Fetcher(into.mover, into.memory, LAYOUT, KEY, patience_s=0.2)
    num_failed = 0
    try:
        for _ in range(_NUM_CONNECTIONS):
            exports = kept()
            exports.complete(NAME)
            try:
                async with asyncio.timeout(20):
                    await fetcher.fetch(wanted(NAME, port))
            except TransferError:
                num_failed += 1
            assert bytes(into.bytes[3 * _BLOCK_BYTES :]).strip(b"\0") == b""
        assert 0 < num_failed < _NUM_CONNECTIONS
    finally:
        server.close()


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", 99999), ("127.0.0.1", -1), ("a" * 300, 1), ("a\0", 1)]
)
async def test_what_is_no_address_is_nobody(host: str, port: int) -> None:
    into = Side("asks")
    source = FetchBlocks(NAME, host, port)
    fetcher = Fetcher(into.mover, into.memory, LAYOUT, KEY, patience_s=1)
    with pytest.raises(TransferError, match="no engine answers"):
        await fetcher.fetch(Wanted(source, DIGEST, [0], 0, lambda _: None))
