"""Messages between engines, front doors and replicas, broken: as bytes, or in what they say."""

import math
import random
from typing import Any

import msgspec

_BLOBS = (b"", b"\0" * 31, b"\xff" * 33)
_LEAVES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64 - 1, math.nan, math.inf,
    -math.inf, -0.5, 1e308, "", "a" * 4096, "\0", "é", [], {}, [None], {"type": "Exec"}, *_BLOBS,
)  # fmt: skip


def broken(rng: random.Random, frame: bytes) -> bytes:
    """Another frame made of one of msgpack; it may still be good."""
    if rng.random() < 0.3:
        return _broken_bytes(rng, frame)
    told = [msgspec.msgpack.decode(frame)]
    for _ in range(rng.randrange(1, 4)):
        _break_one(rng, told)
    return msgspec.msgpack.encode(told[0])


def _broken_bytes(rng: random.Random, frame: bytes) -> bytes:
    data = bytearray(frame)
    match rng.randrange(4):
        case 0:
            return bytes(data[: rng.randrange(len(data))])
        case 1:
            return rng.randbytes(rng.randrange(64))
        case 2:
            start = rng.randrange(len(data))
            return bytes(data[start:] + data[:start])
        case _:
            for _ in range(rng.randrange(1, 9)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            return bytes(data)


def _break_one(rng: random.Random, within: Any) -> None:
    """Replace a value, leave it out, or have it twice."""
    while True:
        key = rng.choice(list(within) if isinstance(within, dict) else range(len(within)))
        value = within[key]
        if not (isinstance(value, dict | list) and value) or rng.random() < 0.2:
            break
        within = value
    if isinstance(within, list) and rng.random() < 0.3:
        within.insert(key, value)
    elif isinstance(within, dict) and rng.random() < 0.2:
        del within[key]
    else:
        within[key] = rng.choice(_LEAVES)
