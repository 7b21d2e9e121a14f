"""Patterns for string formats that llguidance checks less strictly than validators do.

Each pattern excludes strings that llguidance's own lets through: the 29th of February outside leap
years, leap seconds, which most languages' clocks do not support, and too long mailboxes and hosts.
All strings that remain are valid, but not all valid strings remain.
"""

from typing import Any

from legato.grammar.subschemas import mapped

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = f"^(?:[0-9]{{4}}-(?:0[13-9]|1|02-[01]|02-2[0-8])|{_LEAP_YEAR}-02-29)"


def _host(most_chars: int) -> str:
    """Return a pattern of up to five labels of at most `most_chars` characters each.

    Hyphens at a label's third and fourth place are excluded: they announce encodings that only a
    decoder can check. Limiting each label takes a fifth of the time that an intersection takes.
    """
    one, other = "[a-zA-Z0-9]", "[a-zA-Z0-9-]"
    rest = f"(?:{other}{{0,{most_chars - 5}}}{one})?"
    label = f"{one}(?:{one}|{other}(?:{one}{rest}|-{one}{rest}))?"
    return rf"{label}(?:\.{label}){{0,4}}"


_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]"
_MAILBOX = "|".join(
    rf"{_ATOM}{{1,{longest}}}(?:\.{_ATOM}{{1,{longest}}}){{{num_dots}}}"
    for num_dots, longest in ((0, 64), (1, 31), (2, 20), (3, 15))
)

_BESIDE = {
    "date": [_DAY],
    "date-time": [_DAY, "^.{17}[0-5]"],
    "time": ["^.{6}[0-5]"],
}
"""Key a format, value patterns that its strings must match too."""
_INSTEAD = {
    "email": [f"^(?:{_MAILBOX})@{_host(36)}$"],
    "hostname": [f"^{_host(49)}$"],
}
"""Key a format, value patterns that replace llguidance's own."""


def with_strict_formats(schema: Any) -> Any:
    """Return the schema with the patterns of its formats added."""
    if not isinstance(schema, dict):
        return schema
    made = mapped(schema, with_strict_formats)
    name, others = schema.get("format"), made.get("allOf", [])
    if not isinstance(name, str) or name not in _BESIDE | _INSTEAD or not isinstance(others, list):
        return made
    if name in _INSTEAD:
        del made["format"]
    patterns = [{"pattern": pattern} for pattern in (_BESIDE | _INSTEAD)[name]]
    return {**made, "allOf": [*others, *patterns]}
