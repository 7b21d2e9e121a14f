"""Allow-lists of records: which decoders an implementation of the layers can run.

A list names each field of each record with the values that the implementation computes. It refuses
a field that it does not name, even at the default, so that a new field of a record is
refused until it is supported.
"""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from legato.model.spec import DecoderSpec


class Rule(NamedTuple):
    """Attributes:
    is_supported: of a record, whether its field has a supported value.
    supported: those values, in words.
    """

    is_supported: Callable[[Any], bool]
    supported: str


Rules = Mapping[type[msgspec.Struct], Mapping[str, Rule]]
"""Key a kind of record, value the rule of each field that the implementation knows."""


def anything() -> Rule:
    """Allow all values that the record itself allows."""
    return Rule(lambda _: True, "anything")


def one_of(field: str, *values: object) -> Rule:
    """Allow these values."""
    # True equals 1, but a field that counts is no switch.
    allowed = [(type(value), value) for value in values]
    words = " or ".join("none" if value is None else str(value) for value in values)
    return Rule(
        lambda record: (type(getattr(record, field)), getattr(record, field)) in allowed, words
    )


def switch(field: str) -> Rule:
    """Allow on and off."""
    return Rule(lambda record: isinstance(getattr(record, field), bool), "on or off")


def unsupported(name: str, record: msgspec.Struct, rules: Rules) -> str:
    """Return why `record`, or a record in it, is not on the list; empty if all of it is.

    Args:
        name: of the implementation, for the message.
    """
    known = next((rules[kind] for kind in type(record).__mro__ if kind in rules), None)
    if known is None:
        return f"{name} do not compute {_kind(record)}"
    for field in record.__struct_fields__:
        value = getattr(record, field)
        if field not in known:
            return f"{name} do not know {field}"
        if not known[field].is_supported(record):
            found = _kind(value) if isinstance(value, msgspec.Struct) else reprlib.repr(value)
            return f"{field} is {found}, not {known[field].supported}"
        for part in _records(value):
            if reason := unsupported(name, part, rules):
                return reason
    return ""


def why_heads_differ(spec: DecoderSpec) -> str:
    """Return why layers with heads of one size cannot compute a decoder; empty if they can."""
    return "" if spec.has_one_geometry else "layers have heads of different numbers or sizes"


def _kind(record: msgspec.Struct) -> str:
    return type(record).__name__.removesuffix("Spec")


def _records(value: object) -> list[msgspec.Struct]:
    """Return the different records that a field has."""
    values = dict.fromkeys(value) if isinstance(value, tuple) else [value]
    return [part for part in values if isinstance(part, msgspec.Struct)]
