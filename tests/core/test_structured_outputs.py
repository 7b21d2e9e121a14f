from typing import Any

import pytest

from legato import SamplingParams, StructuredOutputs, StructuredOutputsParams
from legato.core.errors import InvalidRequestError
from legato.core.structured_outputs import MAX_CHOICES


@pytest.mark.parametrize("given", [{}, {"regex": "a", "json_object": True}, {"json_object": False}])
def test_there_is_exactly_one_form(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="takes exactly one of json") as refusal:
        StructuredOutputs(**given)
    assert refusal.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("json", ["", {"a": object()}]),
        ("regex", [""]),
        ("choice", [[], [""], "ab", ["a", 1], ["a"] * (MAX_CHOICES + 1)]),
        ("grammar", [""]),
        ("structural_tag", [""]),
    ],
)
def test_values_out_of_range_name_their_field(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError) as refusal:
            StructuredOutputs(**{field: value})
        assert refusal.value.param == f"structured_outputs.{field}"


def test_a_schema_is_kept_as_text_and_choices_as_a_tuple() -> None:
    assert StructuredOutputs(json={"type": "object"}).json == '{"type":"object"}'
    assert StructuredOutputs(json='{"type": "object"}').json == '{"type": "object"}'
    assert StructuredOutputs(choice=["yes", "no"]).choice == ("yes", "no")


def test_the_form_that_is_set() -> None:
    assert StructuredOutputs(json_object=True).form == "json_object"
    assert StructuredOutputsParams(regex="a+", json_object=False).form == "regex"


def test_a_mask_needs_the_token_before() -> None:
    constrained = SamplingParams(structured_outputs=StructuredOutputs(regex="a+"))
    assert constrained.needs_values
    assert not SamplingParams().needs_values
