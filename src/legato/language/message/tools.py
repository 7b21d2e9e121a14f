"""Tools that a model is shown, in plain data."""

from typing import Any

import msgspec

CUSTOM_INPUT = "input"
"""The only parameter of the function that stands for a custom tool."""


class ToolFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function that a model may call.

    Attributes:
        parameters: a JSON schema of its arguments, an object; without one it takes none.
        is_strict: refuse a schema that cannot be enforced, and enforce it in every call.
        input_grammar: of a function that stands for a custom tool: the Lark grammar of its only
            argument, `CUSTOM_INPUT`.
        place: path of its description in the request, for errors.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    is_strict: bool = False
    input_grammar: str | None = None
    place: str = "tools"


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """How a request lets a model use tools.

    Attributes:
        shown: functions that the model is shown.
        callable: those of them that it may call.
        is_required: whether it must call one.
        is_parallel: whether it may call several at once.
    """

    shown: tuple[ToolFunction, ...] = ()
    callable: tuple[ToolFunction, ...] = ()
    is_required: bool = False
    is_parallel: bool = True
