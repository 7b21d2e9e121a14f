"""Strict, bounded JSON parsing; refuses bodies that parsers read differently."""

import json
import re
from codecs import BOM_UTF8
from typing import Any

import msgspec

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
