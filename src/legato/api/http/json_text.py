"""JSON, parsed strictly and within bounds, and written in pieces.

Bodies that parsers read differently are refused.
"""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec
from msgspec import UNSET

from legato.api.limits import MAX_JSON_VALUES
from legato.core.errors import InvalidRequestError

_VALUE_MARKS = (b",", b"[", b"{")
# Two passes, so that neither regex can backtrack.
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_STRING = re.compile(rb'"[^"]*"?')
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(body: bytes) -> Any:
    """Parse a JSON body, with or without a byte order mark.

    Beside malformed JSON, it refuses NaN, lone surrogates in strings, a key that an object has
    twice, and more than `MAX_JSON_VALUES` values.

    Raises:
        InvalidRequestError: the body is not valid.
    """
    body = body.removeprefix(BOM_UTF8)
    _check_num_values(body)
    try:
        value = msgspec.json.decode(body)
        _CHECK_KEYS.decode(body.decode())
    except InvalidRequestError:
        raise
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        reason = "a lone surrogate (\\uD800 to \\uDFFF)" if _has_lone_surrogate(body) else error
        raise InvalidRequestError(f"the body is not valid JSON: {reason}") from error
    return value


def _has_lone_surrogate(body: bytes) -> bool:
    """Whether a string has a lone surrogate, which msgspec may report as truncated data."""
    without_backslashes = body.replace(rb"\\", b"")
    return _SURROGATE.search(_PAIR.sub(b"", without_backslashes)) is not None


def _check_num_values(body: bytes) -> None:
    """Check before parsing: a value takes many times the two bytes of its JSON."""
    if _num_values(body) > MAX_JSON_VALUES:
        without_escapes = _ESCAPE.sub(b"", body)
        if _num_values(_STRING.sub(b"", without_escapes)) > MAX_JSON_VALUES:
            raise InvalidRequestError(f"the body holds more than {MAX_JSON_VALUES} values")


def _num_values(body: bytes) -> int:
    """An upper bound on the number of values; exact if no string contains a mark."""
    return 1 + sum(map(body.count, _VALUE_MARKS))


def _refuse_twice(pairs: list[tuple[str, None]]) -> None:
    keys: set[str] = set()
    for key, _ in pairs:
        if key in keys:
            raise InvalidRequestError(f"the body has the key {key!r} twice in one object")
        keys.add(key)


def _nothing(_: str) -> None:
    return None


_CHECK_KEYS = json.JSONDecoder(
    object_pairs_hook=_refuse_twice,
    parse_float=_nothing,
    parse_int=_nothing,
    parse_constant=_nothing,
)
"""Finds repeated keys. msgspec parses the values, and would keep the last one of a key."""


_NUMBERS_PER_PIECE = 1024
_PIECE_BYTES = 2**16
_LARGE_BYTES = 2**12


class _InPieces:
    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = pieces


def in_pieces(pieces: Iterable[bytes]) -> Any:
    """Return a struct's value whose JSON is these pieces.

    Args:
        pieces: iterated once for each time that the struct is written.
    """
    return _InPieces(pieces)


def array(items: Iterable[bytes]) -> Any:
    """Return a value that stands for an array. Args: items: JSON, iterated as by `in_pieces`."""
    return _InPieces(_array_pieces(items))


def listed(values: Iterable[object]) -> Any:
    """Return a value that stands for an array. Args: values: each made when it is written."""
    return _InPieces(_list_pieces(values))


def numbers(values: Sequence[int]) -> Iterator[bytes]:
    """Return items for `array`, many numbers in each."""
    for start in range(0, len(values), _NUMBERS_PER_PIECE):
        yield encode_json(list(values[start : start + _NUMBERS_PER_PIECE]))[1:-1]


def _array_pieces(items: Iterable[bytes]) -> Iterator[bytes]:
    separator = b"["
    for item in items:
        yield separator + item
        separator = b","
    yield b"[]" if separator == b"[" else b"]"


def _at_once(value: Any) -> msgspec.Raw:
    if not isinstance(value, _InPieces):
        raise NotImplementedError(f"{type(value)} has no JSON")
    return msgspec.Raw(b"".join(value.pieces))


_encoder = msgspec.json.Encoder(enc_hook=_at_once)
encode_json = _encoder.encode
"""Return the JSON of a value in one piece."""
encode_json_into = _encoder.encode_into
"""Write the same into a `bytearray` from an offset on; its end becomes that of the JSON."""


def json_pieces(value: object) -> Iterator[bytes]:
    """Yield the JSON of a value: structs by field, lists by item, other values whole."""
    if isinstance(value, _InPieces):
        yield from value.pieces
    elif isinstance(value, msgspec.Struct):
        yield from _object_pieces(value)
    elif isinstance(value, list):
        yield from _list_pieces(value)
    else:
        yield encode_json(value)


def _list_pieces(values: Iterable[object]) -> Iterator[bytes]:
    separator = b"["
    for value in values:
        yield separator
        yield from json_pieces(value)
        separator = b","
    yield b"[]" if separator == b"[" else b"]"


def _object_pieces(struct: msgspec.Struct) -> Iterator[bytes]:
    config = struct.__struct_config__
    tag = [] if config.tag is None else [(config.tag_field, config.tag)]
    separator = b"{"
    for name, value in chain(tag, ((n, getattr(struct, n)) for n in struct.__struct_fields__)):
        if value is not UNSET:
            yield separator + encode_json(name) + b":"
            yield from json_pieces(value)
            separator = b","
    yield b"{}" if separator == b"{" else b"}"


def joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join small pieces. Large ones are passed on as they are: all who hold one share its bytes."""
    small = bytearray()
    for piece in pieces:
        is_large = len(piece) >= _LARGE_BYTES
        if not is_large:
            small += piece
        if small and (is_large or len(small) >= _PIECE_BYTES):
            yield bytes(small)
            small.clear()
        if is_large:
            yield piece
    if small:
        yield bytes(small)


def cut(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Cut large pieces: little of an answer is held for a client that does not read."""
    for piece in pieces:
        if len(piece) <= _PIECE_BYTES:
            yield piece
            continue
        for start in range(0, len(piece), _PIECE_BYTES):
            yield piece[start : start + _PIECE_BYTES]


class Kept:
    """Caches pieces as they are first read, so that they can be read again."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._made: list[bytes] = []
        self._rest = iter(pieces)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._made
        for piece in self._rest:
            self._made.append(piece)
            yield piece
