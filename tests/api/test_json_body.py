"""JSON as it is read: strictly, and no more of it than is allowed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.api.http import json_text
from legato.api.http.json_text import parse_json
from legato.core.errors import InvalidRequestError

TEXTS = st.text(st.sampled_from('ab,[{":\\\n\u00e9'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def num_inner(value: Any) -> int:
    """Values within it; an empty list or object counts as if it held one."""
    if not isinstance(value, list | dict):
        return 0
    items = list(value.values()) if isinstance(value, dict) else value
    return max(1, len(items)) + sum(map(num_inner, items))


@given(VALUES, st.booleans())
def test_what_is_written_is_read(value: Any, ensure_ascii: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ensure_ascii).encode()) == value


@given(VALUES)
def test_values_are_counted_whatever_texts_hold(value: Any) -> None:
    num_values = 1 + num_inner(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "MAX_JSON_VALUES", num_values)
        parse_json(json.dumps(value).encode())
        patch.setattr(json_text, "MAX_JSON_VALUES", num_values - 1)
        with pytest.raises(InvalidRequestError, match="values"):
            parse_json(json.dumps(value).encode())


@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4), st.data())
def test_a_key_that_comes_twice_is_found(value: dict[str, Any], data: st.DataObject) -> None:
    twice = data.draw(st.sampled_from(sorted(value)))
    pairs = [f"{json.dumps(key)}: {json.dumps(inner)}" for key, inner in value.items()]
    body = f'[{{"x": {{{", ".join(pairs)}, {json.dumps(twice, ensure_ascii=False)}: 1}}}}]'
    with pytest.raises(InvalidRequestError, match="twice"):
        parse_json(body.encode())


@given(TEXTS, st.integers(0xD800, 0xDFFF), TEXTS, st.sampled_from(["%s", "[1, %s]", "{%s: 1}"]))
def test_a_lone_surrogate_is_named(before: str, code: int, after: str, place: str) -> None:
    body = place % json.dumps(before + chr(code) + after)
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        parse_json(body.encode())


@given(TEXTS)
def test_a_pair_of_surrogates_is_a_character(text: str) -> None:
    whole = f"{text}\U0001f3bb\\ud800{text}"
    assert parse_json(json.dumps(whole).encode()) == whole


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"NaN", b"[1,]", b'"\\ud800"', b'"\xff"', b'"a', b'"\\', b"\xef\xbb\xbf",
     b"\xef\xbb\xbf\xef\xbb\xbf1", b"[" * 10_000, b'{"a":' * 10_000, b"1" * 10_000 + b"x"],
)  # fmt: skip
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="JSON"):
        parse_json(body)
