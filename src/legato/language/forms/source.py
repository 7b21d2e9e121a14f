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
from legato.language.forms.json_schema import guided
from legato.language.forms.schema_walk import ENDLESS, endless_place, excess, inexact
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
