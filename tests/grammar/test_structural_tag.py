"""Structural tags, old form and new, on the real vocabulary."""

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from legato import StructuredOutputs
from legato.core.errors import InvalidRequestError
from legato.language.forms.source import grammar_source
from legato.language.tokenizer.tokenizer import Tokenizer
from tests.grammar.test_source import takes

TAGS = [
    {
        "begin": "<f=a>",
        "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
        "end": "</f>",
    },
    {"begin": "<f=b>", "content": {"type": "regex", "pattern": "[a-z/]+"}, "end": "</f>"},
    {"begin": "<f=t>", "content": {"type": "any_text"}, "end": "</f>"},
    {"begin": "<f=g>", "content": {"type": "grammar", "grammar": "start: /[xy]+/"}, "end": "</f>"},
]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}
CONST = {"type": "const_string", "value": "<|im_start|>a"}
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        TRIGGERED,
        ["", "hi", "hi <f=a>12</f> <f=b>a/b</f>.", "<f=t>x</f>", "<f=g>xyx</f>"],
        ["<f=c>", "<f=a>x</f>", "<f=b>ab", "<f=g>z</f>"],
    ),
    (TRIGGERED | {"at_least_one": True}, ["a<f=a>1</f>b"], ["", "hi"]),
    (TRIGGERED | {"stop_after_first": True}, ["hi", "a<f=a>1</f>"], ["a<f=a>1</f>b"]),
    (
        TRIGGERED | {"at_least_one": True, "stop_after_first": True},
        ["a<f=a>1</f>"],
        ["hi", "a<f=a>1</f>b"],
    ),
    (
        {"type": "tags_with_separator", "separator": ", ", "tags": TAGS},
        ["", "<f=a>1</f>", "<f=a>1</f>, <f=b>b</f>"],
        ["<f=a>1</f>,", "<f=a>1</f><f=b>b</f>"],
    ),
    (
        {
            "type": "sequence",
            "elements": [
                CONST,
                {"type": "or", "elements": [CONST, {"type": "regex", "pattern": "[0-9]+"}]},
                {
                    "type": "tag",
                    "begin": "<t>",
                    "content": {"type": "any_text"},
                    "end": "</t><|im_end|>",
                },
            ],
        },
        ["<|im_start|>a12<t>any</t><|im_end|>", "<|im_start|>a<|im_start|>a<t></t><|im_end|>"],
        ["<|im_start|>a<t></t><|im_end|>", "<|im_start|>a1<t>any</t>"],
    ),
]
OLD = {
    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f="],
}


@pytest.mark.parametrize(("form", "right", "wrong"), CASES)
def test_new_form(
    form: dict[str, Any],
    right: list[str],
    wrong: list[str],
    tokenizer: Tokenizer,
    exact: LLTokenizer,
) -> None:
    outputs = StructuredOutputs(structural_tag={"type": "structural_tag", "format": form})
    assert [text for text in right if not takes(outputs, text, tokenizer, exact)] == []
    assert [text for text in wrong if takes(outputs, text, tokenizer, exact)] == []


def test_old_form(tokenizer: Tokenizer, exact: LLTokenizer) -> None:
    outputs = StructuredOutputs(structural_tag=OLD)
    assert takes(outputs, "one <f=a>1</f> two <f=a>2</f> three", tokenizer, exact)
    assert not takes(outputs, "one <f=a>x</f>", tokenizer, exact)


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ([], "must be an object"),
        ({"type": "other"}, "must be an object"),
        ({}, ".format must be an object"),
        ({"format": {"type": "xml"}}, ".format.type 'xml' is not supported"),
        ({"format": {"type": "tag"}}, ".format.begin must be a text"),
        ({"format": {"type": "sequence", "elements": []}}, ".format.elements is empty"),
        ({"format": {"type": "json_schema"}}, ".format.json_schema is missing"),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, CONST]}}, "ends only"),
        ({"format": TRIGGERED | {"triggers": ["x"]}}, "begins with none of the triggers"),
        ({"structures": [{"begin": "<a>"}], "triggers": ["<"]}, ".structures[0].end must be"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tag: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        grammar_source(StructuredOutputs(structural_tag=json.dumps(tag)), ())
    assert message in str(refusal.value)
    assert refusal.value.param == "structured_outputs.structural_tag"


def test_what_is_nested_without_end_is_refused() -> None:
    form: dict[str, Any] = CONST
    for _ in range(100):
        form = {"type": "or", "elements": [form]}
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        grammar_source(StructuredOutputs(structural_tag={"format": form}), ())
