"""Integers in schemas are exact, patterns may be left out, and the work has bounds."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer

from legato.api.bodies.output_form import enforced
from legato.api.openai.chat_body import ChatRequest
from legato.core.errors import InvalidRequestError
from legato.core.structured_outputs import StructuredOutputs
from legato.core.vocabulary import Vocabulary
from legato.grammar.matcher import compile_grammar
from legato.grammar.tokens import grammar_tokenizer
from legato.language.conversation.template import tool_parameters
from legato.language.forms.argument_grammar import ArgumentGrammar, LarkText
from legato.language.forms.check import GrammarChecker
from legato.language.forms.message_grammar import message_form
from legato.language.forms.schema_walk import MAX_NESTING, MAX_SCHEMAS, excess, faulty_place
from legato.language.forms.source import MAX_GRAMMAR_CHARS
from legato.language.message.known_syntaxes import GEMMA, GLM, HERMES, LFM
from legato.language.message.message_syntax import MessageSyntax, NamedCall, ToolCallSyntax
from legato.language.message.tools import ToolFunction
from tests.grammar.schemas import nested
from tests.profiles import examples

_VOCABULARY = Vocabulary.of([bytes([byte]) for byte in range(256)], frozenset())
_TOKENIZER: LLTokenizer = grammar_tokenizer(_VOCABULARY)
_CHECKER = GrammarChecker(lambda: _VOCABULARY)
_LARGE = st.builds(
    lambda power, more, sign: sign * (2**power + more),
    st.integers(50, 70),
    st.integers(-3, 3),
    st.sampled_from([1, -1]),
)


def _takes(schema: dict[str, Any], text: str, *, is_strict: bool) -> bool:
    form = StructuredOutputs(json=enforced(schema, is_strict=is_strict))
    source = _CHECKER.resolve(form).grammar
    assert source is not None
    matcher = compile_grammar(_TOKENIZER, source).matcher
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


_ALLOWED = {
    "const": lambda value, bound: value == bound,
    "enum": lambda value, bound: value == bound,
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}


@given(st.sampled_from(list(_ALLOWED)), _LARGE, st.booleans(), st.booleans())
@examples(150)
def test_integers_are_exact_or_refused(
    keyword: str, bound: int, is_strict: bool, is_nested: bool
) -> None:
    schema: dict[str, Any] = {"type": "integer", keyword: [bound] if keyword == "enum" else bound}
    whole = {"type": "array", "items": schema, "minItems": 1} if is_nested else schema
    place = f"{keyword} {bound} .*at #{'/items' if is_nested else ''} of the schema"
    if abs(bound) >= 2**53:
        with pytest.raises(InvalidRequestError, match=place) as refused:
            _takes(whole, "", is_strict=is_strict)
        assert refused.value.param == "structured_outputs.json"
        return
    for value in range(bound - 2, bound + 3):
        text = f"[{value}]" if is_nested else str(value)
        allowed = _ALLOWED[keyword](value, bound)
        assert _takes(whole, text, is_strict=is_strict) == allowed, value


@pytest.mark.parametrize("syntax", [HERMES, GLM, GEMMA, LFM])
@pytest.mark.parametrize(("choice", "is_strict"), [("required", False), ("auto", True)])
def test_an_integer_of_a_tool_names_its_field(
    syntax: ToolCallSyntax, choice: str, is_strict: bool
) -> None:
    parameters = {"type": "object", "properties": {"id": {"const": 2**53 + 1}}}
    function = {"name": "f", "parameters": parameters, "strict": is_strict}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": choice,
    }
    with pytest.raises(
        InvalidRequestError, match=r"const 9007199254740993 .* #/properties/id"
    ) as e:
        message_form(
            ChatRequest.model_validate(body).tool_use,
            None,
            MessageSyntax(tool_calls=syntax),
            _CHECKER,
            {},
        )
    assert e.value.param == "tools.0.function.parameters"


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" | b\nb: %json {schema}\n',
        'start: "%json " | b\nb: %json\n{schema}',
        '{{"grammars":[{{"json_schema": {schema}}}]}}',
    ],
)
def test_an_integer_of_a_schema_in_a_grammar(grammar: str) -> None:
    text = grammar.format(schema=json.dumps({"items": {"const": 2**53 + 1}}))
    with pytest.raises(InvalidRequestError, match=r"const 9007199254740993 .* #/items") as e:
        _CHECKER.resolve(StructuredOutputs(grammar=text))
    assert e.value.param == "structured_outputs.grammar"
    _CHECKER.resolve(StructuredOutputs(grammar=grammar.format(schema='{"const": 5}')))


def test_an_integer_that_cannot_be_exact_within_a_constant() -> None:
    with pytest.raises(InvalidRequestError, match="const 9007199254740993 is beyond 2"):
        _takes({"const": {"id": [2**53 + 1]}}, "", is_strict=False)


@pytest.mark.parametrize(
    "pattern", ["^(?!x)a", "(?<=a)b", r"(a)\1", r"\bfoo", r"\d+(?=x)", "(?<!a)b", r"a\B"]
)
def test_patterns_that_no_automaton_enforces_are_left_out_unless_strict(pattern: str) -> None:
    for schema in (
        {"type": "string", "pattern": pattern, "maxLength": 2},
        {"type": "string", "maxLength": 2, "allOf": [{"pattern": pattern}]},
    ):
        assert _takes(schema, '"zz"', is_strict=False)
        assert not _takes(schema, '"zzz"', is_strict=False)
        with pytest.raises(InvalidRequestError):
            _takes(schema, '"zz"', is_strict=True)
    named = {"type": "object", "patternProperties": {pattern: {}, "^k$": {"type": "integer"}}}
    assert _takes(named, '{"k":1}', is_strict=False)
    assert not _takes(named, '{"k":"x"}', is_strict=False)
    others = {"additionalProperties": False, "minProperties": 1}
    assert _takes({**named, **others}, '{"m":"x"}', is_strict=False)


@pytest.mark.parametrize("part", ["[", "[^", r"[\\", "[a(?=", "[]"])
def test_a_pattern_is_looked_through_in_linear_time(part: str) -> None:
    """Quadratic work would take hours."""
    pattern = part * (200_000 // len(part))
    with pytest.raises(InvalidRequestError):
        _takes({"type": "string", "pattern": pattern}, "", is_strict=False)


@pytest.mark.parametrize("pattern", [r"^\(?!x$", "^[(?=]+$", r"^\\b$", "^(?:a|b)(?P<n>c)$"])
def test_patterns_that_look_like_those_are_kept(pattern: str) -> None:
    assert not _takes({"type": "string", "pattern": pattern}, '"zz zz"', is_strict=False)


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        _takes({"type": "string", "pattern": "("}, '"z"', is_strict=False)


@pytest.mark.parametrize("strict", [True, False])
def test_json_schema_without_a_schema_is_an_object(strict: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": strict}}
    body = {"messages": [{"role": "user", "content": "x"}], "response_format": form}
    asked = ChatRequest.model_validate(body).output_form
    assert asked is not None
    source = _CHECKER.resolve(asked).grammar
    assert source is not None
    for text, is_allowed in (('{"a": [1]}', True), ("null", False), ('"x"', False), ("[]", False)):
        matcher = compile_grammar(_TOKENIZER, source).matcher
        assert (matcher.try_consume_tokens(list(text.encode())) == len(text)) == is_allowed


def _wide(count: int) -> dict[str, Any]:
    properties = {f"p{i}": {"type": "string"} for i in range(count)}
    return {"type": "object", "properties": properties, "required": list(properties)}


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (nested(400), f"is nested over {MAX_NESTING} deep"),
        (_wide(6_000), f"has over {MAX_SCHEMAS} schemas"),
        ({"enum": [json.loads("[" * 400 + "]" * 400)]}, f"is nested over {MAX_NESTING} deep"),
    ],
)
def test_schemas_that_are_too_large_are_refused_before_any_work(
    schema: dict[str, Any], problem: str
) -> None:
    assert excess(schema) == problem
    with pytest.raises(InvalidRequestError, match=problem) as refused:
        _takes(schema, "", is_strict=False)
    assert refused.value.param == "structured_outputs.json"
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", **schema}},
    }
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    with pytest.raises(ValueError, match=problem):
        ChatRequest.model_validate(body)


def test_schemas_within_the_bounds_compile() -> None:
    for schema in (nested(MAX_NESTING // 2 - 1), _wide(MAX_SCHEMAS - 2)):
        assert excess(schema) is None
        assert not _takes(schema, "", is_strict=True)


_INTEGER = {"type": "integer"}
_MANY = [f"p{i}" for i in range(200)]
_LISTED = {"enum": list(range(20_000))}
_LARGE_OBJECT = {"oneOf": [_wide(8) for _ in range(64)]}


@pytest.mark.parametrize(
    "definition",
    [
        {**_LISTED},
        {"allOf": [_LISTED, _LISTED]},
        {"anyOf": [{"enum": [i, i + 1]} for i in range(60)], "allOf": [{"enum": [1, 2, 3]}] * 9},
        _LARGE_OBJECT,
    ],
)
@pytest.mark.parametrize("syntax", [GLM, GEMMA, LFM])
def test_the_grammar_of_arguments_is_bounded(
    syntax: ToolCallSyntax, definition: dict[str, Any]
) -> None:
    """A short schema whose references make it long."""
    part = {"allOf": [{"$ref": "#/$defs/d"}] * 2}
    parameters = {
        "type": "object",
        "$defs": {"d": definition, "unused": _wide(1_000)},
        "properties": dict.fromkeys(_MANY, part),
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    types = tool_parameters([tool], has_types=True)["f"]
    assert sum(len(of.values) + len(of.texts) for of in types.named.values()) <= 200_000
    assert isinstance(syntax.call, NamedCall)
    grammar = ArgumentGrammar(syntax.call, LarkText({}))
    function = ToolFunction(name="f", parameters=parameters)
    with suppress(InvalidRequestError):
        grammar.of(function, is_lenient=True)
    longest = len(json.dumps(parameters))
    assert sum(map(len, grammar.rules)) < MAX_GRAMMAR_CHARS + 20 * longest


@pytest.mark.parametrize("syntax", [GLM, LFM])
def test_a_rule_has_only_the_definitions_that_it_uses(syntax: ToolCallSyntax) -> None:
    parameters = {
        "type": "object",
        "$defs": {"A": {"type": "array", "items": {"$ref": "#/$defs/B"}}, "B": _wide(500)},
        "properties": {**dict.fromkeys(_MANY, _INTEGER), "a": {"$ref": "#/$defs/A"}},
    }
    function = ToolFunction(name="f", parameters=parameters)
    assert isinstance(syntax.call, NamedCall)
    grammar = ArgumentGrammar(syntax.call, LarkText({}))
    grammar.of(function, is_lenient=True)
    assert sum("p499" in rule for rule in grammar.rules) == 1


def test_the_search_for_a_fault_is_bounded() -> None:
    """Counts schemas that are compiled, each time that they are."""
    definitions = {f"d{i}": nested(3) for i in range(500)}
    schema = {
        "$defs": definitions,
        "properties": {f"x{i}": {"$ref": f"#/$defs/d{i}"} for i in range(500)},
    }
    schema["properties"]["bad"] = {"properties": {"worse": {"uniqueItems": True}}}
    num_compiled = 0

    def is_faulty(part: dict[str, Any]) -> bool:
        nonlocal num_compiled
        text = json.dumps(part)
        num_compiled += text.count("{")
        return "uniqueItems" in text

    assert faulty_place(schema, is_faulty) == "#/properties/bad/properties/worse"
    assert num_compiled < 20_000
    faulty_place(nested(300), is_faulty)
    assert num_compiled < 40_000
