"""What is refused before an engine is asked: with the place in it, and within bounds."""

import contextlib
import time
from typing import Any

import psutil
import pytest

from legato import SamplingParams, StructuredOutputs
from legato.core.errors import InvalidRequestError
from legato.core.vocabulary import Vocabulary
from legato.language.forms.check import GrammarChecker
from legato.language.forms.source import rule_of
from legato.language.tokenizer.tokenizer import Tokenizer
from tests.grammar.schemas import nested

AHEAD = {"type": "string", "pattern": "(?=a)b"}


@pytest.fixture(scope="module")
def checker(tokenizer: Tokenizer) -> GrammarChecker:
    return GrammarChecker(lambda: tokenizer.vocabulary)


def refusal(checker: GrammarChecker, **form: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as refused:
        checker.resolve(StructuredOutputs(**form))
    return refused.value


@pytest.mark.parametrize(
    ("schema", "place", "told"),
    [
        ({"type": "strin"}, "#", "Invalid type: strin"),
        ({"properties": {"x/y": {"items": {"anyOf": [{}, {"not": {}}]}}}},
         "#/properties/x~1y/items/anyOf/1", 'not supported: ["not"]'),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"properties": {"c": AHEAD}}}},
         "#/$defs/b/properties/c", "look-around"),
        ({"prefixItems": [{}, {"uniqueItems": True, "contains": {}}]}, "#/prefixItems/1",
         'not supported: ["contains", "uniqueItems"]'),
        ({"additionalProperties": {"$ref": "#/$defs/none"}}, "#/additionalProperties", "not exist"),
        ({"properties": {"a": {"$ref": "http://other.test/x"}}}, "#/properties/a", "http://other"),
        ({"oneOf": [{"anyOf": []}]}, "#/oneOf/0", "anyOf is empty"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "#", "no output"),
    ],
)  # fmt: skip
def test_the_place_in_a_schema_is_named(
    schema: Any, place: str, told: str, checker: GrammarChecker
) -> None:
    error = refusal(checker, json=schema)
    assert error.param == "structured_outputs.json"
    assert told in str(error)
    assert f" at {place}" in str(error)


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ({"regex": "a["}, "unclosed character class"),
        ({"regex": "a(?!b)"}, "look-around"),
        ({"grammar": 'start: x\nx: "a" | b'}, 'unknown name: "b", at line 2, column 4'),
        ({"grammar": "start: <|nothing|>"}, "unknown special token"),
        ({"json": "{"}, "not valid JSON"),
        ({"json": "3"}, "schema must be an object or boolean"),
    ],
)
def test_what_is_wrong_with_others(
    form: dict[str, Any], told: str, checker: GrammarChecker
) -> None:
    error = refusal(checker, **form)
    assert told in str(error)
    assert error.param == f"structured_outputs.{next(iter(form))}"


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": ["a", "b\U00050000"]}, "#"),
        ({"$ref": "#/$defs/d", "$defs": {"d": {"enum": [1, {"x\U00050000": 2}]}}}, "#/$defs/d"),
        ({"type": "array", "items": {"properties": {"\U00050000": True}}}, "#/items"),
    ],
)
def test_what_the_vocabulary_cannot_spell(
    schema: dict[str, Any], place: str, checker: GrammarChecker
) -> None:
    """SmolLM2 has no token with the byte 0xF1."""
    error = refusal(checker, json=schema)
    assert "\\U00050000" in str(error)
    assert f"at {place} of the schema" in str(error)
    assert error.param == "structured_outputs.json"
    told = {"type": "string", "title": "\U00050000", "enum": ["\x04", "é😀"]}
    checker.resolve(StructuredOutputs(json=told))


def test_a_schema_may_ask_to_pass_over_what_is_not_supported(checker: GrammarChecker) -> None:
    lenient = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    params = checker.resolved(SamplingParams(structured_outputs=StructuredOutputs(json=lenient)))
    assert params.structured_outputs is not None
    assert params.structured_outputs.form == "grammar"
    assert checker.resolved(SamplingParams()) == SamplingParams()


_FRAMES = (
    'start: (call | content)\ncall: "<call>" /(?s:.*)/\ncontent: {}',
    'start: thought content\nthought[lazy]: /(?s:.*)/ "</think>"\ncontent: {}',
)


@pytest.mark.parametrize(
    "form",
    [
        {"json": {"type": "strin"}},
        {"json": {"anyOf": []}},
        {"json": {"type": "string", "pattern": r"^[^\s\S]$"}},
        {"json": {"type": "string", "pattern": "^a$", "minLength": 3}},
        {"json": {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 2}},
        {"json": {"type": "object", "required": ["a"], "additionalProperties": False}},
        {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
        {"json": {"const": 2**53 + 1}},
        {"regex": r"[^\s\S]"},
        {"regex": "a["},
        {"choice": ["a" * 300_000]},
    ],
)
@pytest.mark.parametrize("frame", _FRAMES)
def test_what_fails_alone_fails_as_a_part(
    frame: str, form: dict[str, Any], checker: GrammarChecker
) -> None:
    def resolve_as_part(outputs: StructuredOutputs) -> None:
        content = rule_of(outputs)
        checker.check_part(outputs)
        checker.resolve(StructuredOutputs(grammar=frame.format(content)))

    refusal(checker, **form)
    with pytest.raises(InvalidRequestError):
        resolve_as_part(StructuredOutputs(**form))
    resolve_as_part(StructuredOutputs(json={"type": "object"}))


def test_a_part_that_the_vocabulary_cannot_spell_is_refused() -> None:
    checker = GrammarChecker(
        lambda: Vocabulary.of([bytes([byte]) for byte in range(128)], frozenset())
    )
    forms: list[dict[str, Any]] = [{"json": {"const": "é"}}, {"choice": ["é"]}, {"regex": "é"}]
    for form in forms:
        with pytest.raises(InvalidRequestError) as refused:
            checker.check_part(StructuredOutputs(**form))
        assert refused.value.param == f"structured_outputs.{next(iter(form))}"


def named(count: int) -> dict[str, Any]:
    return {f"a{i}": {"type": "string"} for i in range(count)}


BOMBS: dict[str, dict[str, Any]] = {
    "nested": {"json": nested(400)},
    "nested deeper": {"json": 20_000 * '{"items":' + "{}" + 20_000 * "}"},
    "alternatives": {"json": {"anyOf": [{"properties": {name: {}}} for name in named(3000)]}},
    "properties": {"json": {"type": "object", "properties": named(6000)}},
    "combinations": {
        "json": {"allOf": [{"anyOf": [{"properties": {n + "x": {}}}, {"properties": {n: {}}}]}
                           for n in named(18)]}
    },
    "references": {
        "json": {
            "$ref": "#/$defs/a0",
            "$defs": {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 4} for i in range(12)}
            | {"a12": {"type": "string"}},
        }
    },
    "loop": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 9}}}},
    "enumeration": {"json": {"enum": [f"{i:08}" for i in range(20_000)]}},
    "repetitions": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "remembered": {"regex": "(.*a.{400})|(.*b.{400})|(.*c.{400})"},
    "unicode": {"regex": r"(\p{L}{1,300}\p{N}{1,300}){1,300}"},
    "items": {"json": {"type": "array", "items": nested(3), "minItems": 10**8}},
    "rules": {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60))
              + 'r60: "a"'},
    "ambiguous": {"grammar": 'start: a\na: a a | "x" | ""'},
    "tags": {"structural_tag": {"format": {"type": "or", "elements": [
        {"type": "tag", "begin": "<a>", "end": "</a>", "content": {"type": "any_text"}}] * 2000}}},
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_what_is_made_to_explode_does_not(name: str, checker: GrammarChecker) -> None:
    """Taken or refused, it takes no more than bounded time and memory."""
    process = psutil.Process()
    before_bytes, started_s = process.memory_info().rss, time.process_time()
    with contextlib.suppress(InvalidRequestError):
        checker.resolve(StructuredOutputs(**BOMBS[name]))
    assert time.process_time() - started_s < 10
    assert process.memory_info().rss - before_bytes < 2**29
