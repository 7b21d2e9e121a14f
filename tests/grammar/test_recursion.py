"""Schemas that refer to themselves: those with a base case are held to, the others refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato import StructuredOutputs
from legato.core.errors import InvalidRequestError
from legato.language.forms.check import GrammarChecker
from legato.language.forms.schema_walk import endless_place
from legato.language.tokenizer.tokenizer import Tokenizer
from tests.profiles import examples

SELF = {"$ref": "#"}
LOOP = {"$ref": "#/$defs/a"}
ENDLESS: list[tuple[dict[str, Any], str]] = [
    (SELF, "#"),
    ({"type": "object", **SELF}, "#"),
    ({"anyOf": [SELF]}, "#"),
    ({"allOf": [{"type": "object"}, SELF]}, "#"),
    ({**LOOP, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": LOOP}}, "#"),
    ({"type": "object", "properties": {"x": SELF}, "required": ["x"]}, "#"),
    ({"type": "array", "items": SELF, "minItems": 1}, "#"),
    ({"type": "array", "prefixItems": [{}, SELF], "minItems": 2}, "#"),
    ({"properties": {"x/y": {"$ref": "#/properties/x~1y"}}}, "#/properties/x~1y"),
    ({"properties": {"p": LOOP}, "$defs": {"a": {"oneOf": [LOOP, LOOP]}}}, "#/properties/p"),
]
FINITE: list[dict[str, Any]] = [
    {"type": "object", "properties": {"x": SELF}},
    {"type": "array", "items": SELF},
    {"type": "object", "properties": {"next": {"anyOf": [SELF, {"type": "null"}]}},
     "required": ["next"]},
    {"type": "object", "properties": {"kids": {"type": "array", "items": SELF}},
     "required": ["kids"]},
    {"type": ["object", "null"], "properties": {"x": SELF}, "required": ["x"]},
    {"type": "integer", "$defs": {"a": LOOP}},
    {**LOOP, "$defs": {"a": {"anyOf": [{"type": "integer"}, {"type": "array", "items": LOOP,
     "minItems": 2}]}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def checker(tokenizer: Tokenizer) -> GrammarChecker:
    return GrammarChecker(lambda: tokenizer.vocabulary)


@pytest.mark.parametrize(("schema", "place"), ENDLESS)
def test_a_schema_without_a_base_case_is_refused(
    schema: dict[str, Any], place: str, checker: GrammarChecker
) -> None:
    assert endless_place(schema) == place
    tag = {"begin": "<", "schema": schema, "end": ">"}
    for form in (
        {"json": schema},
        {"structural_tag": json.dumps({"structures": [tag], "triggers": ["<"]})},
    ):
        with pytest.raises(InvalidRequestError, match="refers to itself without end") as info:
            checker.resolve(StructuredOutputs(**form))
        assert info.value.param == f"structured_outputs.{next(iter(form))}"


@pytest.mark.parametrize("schema", FINITE)
def test_a_schema_with_a_base_case_compiles(
    schema: dict[str, Any], checker: GrammarChecker
) -> None:
    assert endless_place(schema) is None
    checker.resolve(StructuredOutputs(json=schema))


def test_many_definitions_take_linear_time() -> None:
    """Were each looked at once for each other, this would take an hour."""
    count = 100_000
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(count)}
    last = {f"a{count}": {"type": "integer"}}
    assert endless_place({"$ref": "#/$defs/a0", "$defs": {**chain, **last}}) is None
    assert endless_place({"$ref": "#/$defs/a0", "$defs": {**chain, f"a{count}": SELF}}) == "#"
    nested: dict[str, Any] = {}
    for _ in range(count):
        nested = {"items": nested}
    assert endless_place(nested) is None


REFERENCES = st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "#/items", "#/nothing", "http://x"])


def schemas() -> st.SearchStrategy[Any]:
    leaves = st.sampled_from([True, {}, {"type": "integer"}]) | st.builds(
        lambda reference: {"$ref": reference}, REFERENCES
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.fixed_dictionaries(
                {"type": st.sampled_from(["object", ["object", "null"]])},
                optional={
                    "properties": st.dictionaries(st.sampled_from("xy"), inner),
                    "required": st.lists(st.sampled_from("xy"), unique=True),
                },
            ),
            st.fixed_dictionaries(
                {"type": st.just("array"), "items": inner}, optional={"minItems": st.integers(0, 2)}
            ),
            st.fixed_dictionaries(
                {}, optional={name: st.lists(inner, max_size=2) for name in ("anyOf", "allOf")}
            ),
        ),
        max_leaves=6,
    )


def has_value(schema: Any, root: Any, fuel: int, known: dict[tuple[int, int], bool]) -> bool:
    """Whether a value of so many levels satisfies it; `known` has what was asked before."""
    if not isinstance(schema, dict):
        return True
    if fuel == 0:
        return False
    question = (id(schema), fuel)
    if question in known:
        return known[question]
    found: Any = root
    steps = schema.get("$ref", "http://x").split("/")
    for step in steps[1:] if steps[0] == "#" else []:
        found = found.get(step) if isinstance(found, dict) else None
    targets = [] if steps[0] != "#" or found is None else [found]
    needed = [*targets, *schema.get("allOf", [])]
    if schema.get("type") == "object":
        properties = schema.get("properties", {})
        needed += [properties[name] for name in schema.get("required", []) if name in properties]
    if schema.get("type") == "array" and schema.get("minItems", 0) > 0:
        needed.append(schema["items"])
    options = schema.get("anyOf") or [True]
    known[question] = all(has_value(inner, root, fuel - 1, known) for inner in needed) and any(
        has_value(inner, root, fuel - 1, known) for inner in options
    )
    return known[question]


@given(schemas(), schemas(), schemas())
@examples(300)
def test_the_outermost_schema_is_endless_if_no_depth_suffices(root: Any, a: Any, b: Any) -> None:
    schema = {"allOf": [root], "items": {}, "$defs": {"a": a, "b": b}}
    assert (endless_place(schema) == "#") == (not has_value(schema, schema, 100, {}))
