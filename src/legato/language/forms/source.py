"""Turns a requested form of output into a grammar that llguidance compiles."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from legato.core.errors import InvalidRequestError
from legato.core.structured_outputs import StructuredOutputs
from legato.language.forms.schema_walk import ENDLESS, endless_place, excess, inexact, mapped
from legato.language.forms.structural_tag import structural_tag_source

# Without this, llguidance would allow only one spelling in tokens of a text that is known ahead,
# and ask the tokenizer for it in the middle of a step.
_OPTIONS = '%llguidance {"no_forcing": true}'
_WHITESPACE = r"[ \n\r\t]{1,20}"
"""Limited: a small model that may write any number of blanks writes them until its tokens end."""
MAX_GRAMMAR_CHARS = 2**18
"""Limit of a schema, a pattern, a grammar, a tag, or all choices together."""
_JSON_SCHEMA = re.compile(r'(?:%json|"json_schema"\s*+:)\s*+')
"""What precedes a schema in Lark, and in a source in JSON."""
_GBNF_RULE = re.compile(r"^[^\S\n]*+[\w-]++\s*+::=", re.MULTILINE)


def grammar_source(outputs: StructuredOutputs, special_tokens: Iterable[str]) -> str:
    """Return the grammar of exactly the requested outputs, for `compile_grammar`.

    Args:
        special_tokens: texts of tokens that steer the model; such a text at the beginning or end of
            a tag means the token.

    Raises:
        InvalidRequestError: the form is too long or malformed; `param` names the field.
    """
    _check_length(outputs)
    match outputs.form:
        case "json" | "json_object" | "regex":
            return _lark(f"start: {rule_of(outputs)}")
        case "choice":
            assert outputs.choice is not None
            return _lark(f"start: CHOICE\nCHOICE: {' | '.join(map(_json, outputs.choice))}")
        case "grammar":
            assert outputs.grammar is not None
            return _grammar(outputs.grammar.removeprefix("\ufeff"))
        case _:
            assert isinstance(outputs.structural_tag, str), "kept as text"
            tag = parse_json(outputs.structural_tag, "structural_tag")
            return structural_tag_source(
                tag, _OPTIONS, special_tokens, lambda schema: json_rule(schema, outputs)
            )


def rule_of(outputs: StructuredOutputs) -> str | None:
    """Return the grammar as the right side of one rule; None if it takes several rules.

    Raises:
        InvalidRequestError: as `grammar_source`.
    """
    _check_length(outputs)
    match outputs.form:
        case "json":
            assert isinstance(outputs.json, str), "kept as text"
            return json_rule(parse_json(outputs.json, "json"), outputs)
        case "json_object":
            return json_rule({"type": "object"}, outputs)
        case "regex":
            assert outputs.regex is not None
            return f"/{regex_to_lark(outputs.regex, 'd')}/"
        case "choice":
            assert outputs.choice is not None
            return " | ".join(map(_json, outputs.choice))
        case _:
            return None


def parse_json(text: str, name: str) -> Any:
    """Parse a field's JSON text; `name` is the field's."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        param = f"structured_outputs.{name}"
        raise InvalidRequestError(f"{param} is not valid JSON: {error}", param=param) from error


def json_rule(schema: Any, outputs: StructuredOutputs) -> str:
    """Return the right side of a rule for JSON by a schema.

    Raises:
        InvalidRequestError: as `check_schema`.
    """
    check_schema(schema, f"structured_outputs.{outputs.form}")
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        schema = guided(schema, _whitespace(outputs), is_lenient=_is_lenient(schema))
    return f"%json {_json(schema)}"


def check_schema(schema: Any, param: str) -> None:
    """Check what can be known of a JSON schema before it compiles.

    Raises:
        InvalidRequestError: it is too large, has integers that cannot be exact, or refers to itself
            without a base case.
    """
    too_large = excess(schema)
    if too_large is not None:
        raise InvalidRequestError(f"the schema {too_large}", param=param)
    place = endless_place(schema)
    _refuse(inexact(schema) if place is None else f"{ENDLESS}, at {place}", param)


def _refuse(problem: str | None, param: str) -> None:
    if problem is not None:
        raise InvalidRequestError(
            f"the form of the output cannot be met: {problem} of the schema", param=param
        )


def _whitespace(outputs: StructuredOutputs) -> dict[str, Any]:
    if outputs.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": outputs.whitespace_pattern or _WHITESPACE}


def _is_lenient(schema: dict[str, Any]) -> bool:
    """Whether the schema sets `lenient`, the only option of llguidance that a schema may set."""
    options = schema.get("x-guidance")
    return isinstance(options, dict) and options.get("lenient") is True


def _grammar(grammar: str) -> str:
    """Return the source of Lark, of GBNF, the format of llama.cpp and vLLM, or of a source in JSON.

    Only GBNF has a rule that begins with a name and `::=`.
    """
    is_json = grammar.startswith('{"grammars":')  # made here, of a tag with a grammar
    if is_json or not _GBNF_RULE.search(grammar):
        for schema in _schemas(grammar):
            _refuse(inexact(schema), "structured_outputs.grammar")
        return grammar if is_json else _lark(grammar)
    try:
        return _lark(gbnf_to_lark(grammar))
    except Exception as error:  # the converter's error class is not exported
        param = "structured_outputs.grammar"
        raise InvalidRequestError(f"{param}: {error}", param=param) from error


def _schemas(grammar: str) -> Iterator[Any]:
    """Yield the JSON schemas in a grammar; the compiler refuses other texts."""
    decoder, found = json.JSONDecoder(), _JSON_SCHEMA.search(grammar)
    while found is not None:
        end = found.end()
        with suppress(ValueError, RecursionError):
            schema, end = decoder.raw_decode(grammar, end)
            yield schema
        found = _JSON_SCHEMA.search(grammar, end)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _check_length(outputs: StructuredOutputs) -> None:
    value = getattr(outputs, outputs.form)
    num_chars = sum(map(len, value)) if isinstance(value, tuple) else len(str(value))
    if num_chars > MAX_GRAMMAR_CHARS:
        param = f"structured_outputs.{outputs.form}"
        raise InvalidRequestError(f"{param} has over {MAX_GRAMMAR_CHARS} characters", param=param)


def _lark(rules: str) -> str:
    """Append the options after the rules, so that line numbers in errors are the client's own."""
    return f"{rules}\n{_OPTIONS}\n"


_TOLD = frozenset({"additionalProperties", "patternProperties"})
_COMBINING = frozenset(
    {"allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"}
)
"""Keywords under which the properties of one object may be named at several places."""
_COMBINED = frozenset({"$ref", "anyOf", "oneOf"})
"""Keywords that do so too beside `properties`."""


def enforced(schema: dict[str, Any], *, is_strict: bool) -> dict[str, Any]:
    """Prepare a schema for `StructuredOutputs`.

    Args:
        is_strict: whether unsupported keywords are refused, not ignored.
    """
    return schema if is_strict else {**schema, "x-guidance": {"lenient": True}}


def guided(schema: dict[str, Any], options: dict[str, Any], *, is_lenient: bool) -> dict[str, Any]:
    """Return the schema for a rule's `%json`.

    Args:
        options: llguidance's own, for whitespace.
        is_lenient: whether to ignore keywords unknown to llguidance and patterns that it cannot
            enforce, and let alternatives of `oneOf` overlap.
    """
    guidance = options | {"lenient": is_lenient, "coerce_one_of": is_lenient}
    prepared = _prepared(closed(schema), is_lenient=is_lenient)
    return {**prepared, "x-guidance": guidance}


def _prepared(schema: dict[str, Any], *, is_lenient: bool) -> dict[str, Any]:
    try:
        made: dict[str, Any] = with_strict_formats(schema)
        if is_lenient:
            made = _with_regular_patterns(made)
    except RecursionError:  # too deep: the compiler reports that
        return schema
    return made


def _with_regular_patterns(schema: Any) -> Any:
    """Return the schema without the patterns that no automaton can enforce."""
    if not isinstance(schema, dict):
        return schema
    made = mapped(schema, _with_regular_patterns)
    if not _is_regular(made.get("pattern")):
        del made["pattern"]
    named = made.get("patternProperties")
    if isinstance(named, dict) and not all(map(_is_regular, named)):
        made["patternProperties"] = {key: part for key, part in named.items() if _is_regular(key)}
        made.pop("additionalProperties", None)  # a name may match a pattern that is left out
    return made


def _is_regular(pattern: Any) -> bool:
    """Whether a pattern has no look-around, word boundary or reference to a group."""
    if not isinstance(pattern, str):
        return True
    return not any(found["irregular"] for found in _PATTERN_PART.finditer(pattern))


_PATTERN_PART = re.compile(
    r"(?P<irregular>\\[bBk1-9]|\(\?<?[=!])|\\.|\[\^?\]?(?:[^\]\\]|\\.)*+\]?", re.DOTALL
)
"""A class that is not closed goes on to the end: reading takes linear time."""


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with `additionalProperties: false` where it says nothing about others.

    JSON Schema allows other properties by default. But a small model that may add properties
    invents them until its tokens run out, and authors who omit the keyword seldom mean to allow
    them; xgrammar, vLLM's default, reads schemas in the same way.

    A schema that combines schemas of one object is returned unchanged: each names only a part of
    it.
    """
    try:
        made: dict[str, Any] = _closed(schema)
    except (_CombinedError, RecursionError):  # too deep: the compiler reports that
        return schema
    return made


class _CombinedError(Exception):
    pass


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    if schema.keys() & _COMBINING or ("properties" in schema and schema.keys() & _COMBINED):
        raise _CombinedError
    made = mapped(schema, _closed)
    if _is_open(schema):
        made["additionalProperties"] = False
    return made


def _is_open(schema: dict[str, Any]) -> bool:
    """Whether a schema names properties, says nothing about others and requires no others."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or schema.keys() & _TOLD:
        return False
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    needs_others = isinstance(required, list) and not properties.keys() >= set(map(str, required))
    return not needs_others and not (isinstance(least, int) and least > len(properties))


def _host(most_chars: int) -> str:
    """Return a pattern of up to five labels of at most `most_chars` characters each.

    Hyphens at a label's third and fourth place are excluded: they announce encodings that only a
    decoder can check. Limiting each label takes a fifth of the time that an intersection takes.
    """
    one, other = "[a-zA-Z0-9]", "[a-zA-Z0-9-]"
    rest = f"(?:{other}{{0,{most_chars - 5}}}{one})?"
    label = f"{one}(?:{one}|{other}(?:{one}{rest}|-{one}{rest}))?"
    return rf"{label}(?:\.{label}){{0,4}}"


_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = f"^(?:[0-9]{{4}}-(?:0[13-9]|1|02-[01]|02-2[0-8])|{_LEAP_YEAR}-02-29)"

_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]"
_MAILBOX = "|".join(
    rf"{_ATOM}{{1,{longest}}}(?:\.{_ATOM}{{1,{longest}}}){{{num_dots}}}"
    for num_dots, longest in ((0, 64), (1, 31), (2, 20), (3, 15))
)

_BESIDE = {"date": [_DAY], "date-time": [_DAY, "^.{17}[0-5]"], "time": ["^.{6}[0-5]"]}
"""Key a format, value patterns that its strings must match too."""
_INSTEAD = {"email": [f"^(?:{_MAILBOX})@{_host(36)}$"], "hostname": [f"^{_host(49)}$"]}
"""Key a format, value patterns that replace llguidance's own."""


def with_strict_formats(schema: Any) -> Any:
    """Return the schema with patterns for the formats that llguidance checks less strictly.

    Each pattern excludes strings that llguidance's own lets through: the 29th of February outside
    leap years, leap seconds, which most languages' clocks do not support, and too long mailboxes
    and hosts. All strings that remain are valid, but not all valid strings remain.
    """
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
