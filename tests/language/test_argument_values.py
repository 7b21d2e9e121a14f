"""Bare texts of arguments as JSON, where a number may be beyond those of Python."""

import pytest

from legato.language.message.message_syntax import ArgumentType
from legato.language.message.tagged_arguments import json_value


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("[-477E363]", ArgumentType(is_text=True, kinds=("array",)), "[-477E363]"),
        ('{"a": 1e999}', ArgumentType(kinds=("object",)), '{"a": 1e999}'),
        ("-477E363", ArgumentType(kinds=("number",)), "-477E363"),
        ("1e999", ArgumentType(is_text=True, values=("1",)), '"1e999"'),
        ("1e999", ArgumentType(values=("1e999",)), "1e999"),
        ("[1,]", ArgumentType(is_text=True, kinds=("array",)), '"[1,]"'),
    ],
)
def test_a_number_of_any_size_is_a_number(text: str, kind: ArgumentType, expected: str) -> None:
    assert json_value(text, kind) == expected
