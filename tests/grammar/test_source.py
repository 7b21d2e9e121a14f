"""Which texts each form takes, on the real vocabulary."""

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from legato import StructuredOutputs
from legato.core.errors import InvalidRequestError
from legato.grammar.matcher import compile_grammar
from legato.grammar.tokens import special_token_texts
from legato.language.forms.check import GrammarChecker
from legato.language.forms.source import grammar_source
from legato.language.tokenizer.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS: list[tuple[Any, list[Any], list[Any]]] = [
    (PERSON, [{"name": "Ada", "age": 36}], [{"name": "Ada"}, {"name": "A", "age": -1}, []]),
    (TREE, [{"value": 1, "children": [{"value": 2.5}]}], [{"value": "1"}, {"children": []}]),
    ({"type": "string"}, ["", "é😀", 'a "quoted" line\n'], [1, None]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^[a-z]+-\\d{2}$"}, ["ab-12"], ["ab-1", "-12"]),
    (
        {"type": "string", "format": "date"},
        ["2024-02-29", "2000-02-29", "2023-12-31"],
        ["2024-2-9", "today", "2023-02-29", "1900-02-29", "2024-02-30"],
    ),
    (
        {"type": ["string", "null"], "format": "date-time", "pattern": "^2"},
        ["2024-02-29T23:59:59.5Z", "2023-02-28T00:00:00+02:00", None],
        ["2023-02-29T23:59:59Z", "2024-02-29T23:59:60Z", "1024-02-29T23:59:59Z"],
    ),
    ({"format": "time", "type": "string"}, ["12:30:59-02:00"], ["12:30:60-02:00", "12:30"]),
    (
        {"type": "string", "format": "email"},
        ["john.m.smith+x@mail-1.example.co.uk", f"{64 * 'a'}@b", f"a@{35 * 'b'}.c"],
        [f"{65 * 'a'}@b", f"a@{64 * 'b'}.c", "a..b@c", "a@-b", "a@b_c", "@b", "a@"],
    ),
    (
        {"type": "string", "format": "hostname"},
        ["ip-10-0-0-1.ec2.internal", "a", "a1.b-c"],
        ["xn--a.com", "-a.b", "a-.b", "a..b", f"{64 * 'a'}.b", ".".join(6 * [49 * "a"])],
    ),
    ({"type": "string", "format": "uuid"}, ["12345678-1234-1234-1234-123456789abc"], ["1234"]),
    ({"type": "string", "enum": ["a", "b c"]}, ["a", "b c"], ["b", "c"]),
    ({"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}]),
    ({"enum": [1, "x", None, True]}, [1, "x", None, True], [2, "y", False]),
    ({"type": "integer"}, [0, -12, 10**20], [1.5, "1"]),
    ({"type": "integer", "minimum": 3, "maximum": 117}, [3, 99, 117], [2, 118]),
    ({"type": "integer", "exclusiveMinimum": 3, "multipleOf": 5}, [5, 100], [3, 7]),
    ({"type": "number"}, [0, -1.25, 1e30], ["1", None]),
    ({"type": "number", "minimum": 0, "maximum": 1}, [0, 0.5, 1], [1.01, -0.1]),
    ({"type": "boolean"}, [True, False], [0, "true"]),
    ({"type": "null"}, [None], [0]),
    ({"type": ["string", "null"]}, ["a", None], [1]),
    ({"type": "array"}, [[], [1, "a", [None]]], [{}]),
    ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"]]),
    ({"type": "array", "items": {}, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3]]),
    (
        {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
        [["a", 1]],
        [[1, "a"], ["a", 1, 2]],
    ),
    ({"type": "object"}, [{}, {"a": {"b": 1}}], [[], 1]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"a": 1}], [{"a": "b"}]),
    (
        {"type": "object", "patternProperties": {"^n_": {"type": "number"}}},
        [{"n_a": 1}, {"b": "c"}],
        [{"n_a": "x"}],
    ),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [None, [1]]),
    ({"oneOf": [{"type": "string"}, {"type": "array"}]}, ["a", [1]], [1]),
    (
        {
            "allOf": [{"properties": {"a": {"type": "integer"}}}, {"required": ["a"]}],
            "type": "object",
        },
        [{"a": 1}],
        [{"a": "b"}],
    ),
    ({"type": "object", "minProperties": 1, "maxProperties": 1}, [{"a": 1}], [{}]),
    (True, [1, "a", {"b": [None]}], []),
    ({}, [1, "a", {"b": [None]}], []),
]
FORMS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "{"]),
    ({"regex": r"\d{3}/[a-z]*"}, ["123/", "123/ab"], ["12/", "123/A", "٣٣٣/"]),
    ({"regex": "^a|b$"}, ["a", "b"], ["ab"]),
    ({"choice": ["yes", "no", "é😀\n", 'a"\\']}, ["yes", "no", "é😀\n", 'a"\\'], ["y", "maybe"]),
    ({"grammar": 'start: "a" b+\nb: "b" | "c"'}, ["ab", "acb"], ["a", "bc"]),
    ({"grammar": 'root ::= "a" x+\nx ::= [b-c]'}, ["ab", "acb"], ["a", "bc"]),
    ({"grammar": '?start: "a"'}, ["a"], ["b"]),
    ({"grammar": 'start[capture]: "a"'}, ["a"], ["b"]),
    ({"grammar": '\ufeffstart: "a"'}, ["a"], ["b"]),
    ({"grammar": '// root ::= "b"\nstart: "a"'}, ["a"], ["b"]),
    ({"grammar": 'start: "::=" x\nx: "b"\n  | "c ::= d"'}, ["::=b", "::=c ::= d"], ["b"]),
    ({"grammar": '# start: "b"\nroot ::= "start:" [:] | "x"'}, ["start::", "x"], ["b"]),
    ({"grammar": '  begin ::= "a"\nroot ::= begin "b"'}, ["ab"], ["a"]),
    ({"json": {"const": "root ::= x"}}, ['"root ::= x"'], ["x"]),
    ({"choice": ["a ::= b"]}, ["a ::= b"], ["b"]),
    (
        {"structural_tag": {"format": {"type": "grammar", "grammar": 'start: "a"+'}}},
        ["a", "aa"],
        ["", "b"],
    ),
    ({"json": PERSON, "disable_any_whitespace": True}, ['{"name":"A","age":1}'], ['{ "name":"A"']),
    ({"json": {"type": "array"}}, ["[1,\n  2]"], ["[1," + 30 * " " + "2]"]),
    ({"json": {"type": "array"}, "whitespace_pattern": "_"}, ["[1,_2]"], ["[1, 2]"]),
]


def takes(form: StructuredOutputs, text: str, tokenizer: Tokenizer, exact: LLTokenizer) -> bool:
    """Whether a text is a whole output of a form, token by token."""
    source = grammar_source(form, special_token_texts(tokenizer.vocabulary))
    matcher = compile_grammar(exact, source).matcher
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize(("schema", "right", "wrong"), SCHEMAS, ids=lambda value: str(value)[:50])
def test_json_schemas(
    schema: Any, right: list[Any], wrong: list[Any], tokenizer: Tokenizer, exact: LLTokenizer
) -> None:
    form = StructuredOutputs(json=json.dumps(schema))
    for value in right:
        assert takes(form, json.dumps(value, ensure_ascii=False), tokenizer, exact), value
    for value in wrong:
        assert not takes(form, json.dumps(value), tokenizer, exact), value


@pytest.mark.parametrize(("form", "right", "wrong"), FORMS)
def test_other_forms(
    form: dict[str, Any],
    right: list[str],
    wrong: list[str],
    tokenizer: Tokenizer,
    exact: LLTokenizer,
) -> None:
    outputs = StructuredOutputs(**form)
    checker = GrammarChecker(lambda: tokenizer.vocabulary)
    resolved = checker.resolve(outputs)
    for same in (outputs, resolved, checker.resolve(resolved)):
        assert [text for text in right if not takes(same, text, tokenizer, exact)] == []
        assert [text for text in wrong if takes(same, text, tokenizer, exact)] == []


@pytest.mark.parametrize("field", ["json", "regex", "grammar", "structural_tag"])
def test_what_is_too_long_is_refused_unread(field: str) -> None:
    with pytest.raises(InvalidRequestError, match="characters") as refusal:
        grammar_source(StructuredOutputs(**{field: "x" * 300_000}), ())
    assert refusal.value.param == f"structured_outputs.{field}"
