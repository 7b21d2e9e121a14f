"""Reads a checkpoint's own declaration of its messages: transformers' `response_template`.

Only its literal marks are used. Its patterns are programs of the checkpoint's author, which a
shared server must not run on every token.
"""

from typing import Any

import msgspec

from legato.language.message.message_syntax import JsonCall, Marks, MessageSyntax, ToolCallSyntax

_MAX_MARK_CHARS = 64
_REASONING = ("thinking", "reasoning_content", "reasoning")


class _Field(msgspec.Struct):
    """A field of the template under transformers' names; one of another type is ignored."""

    open: str
    close: str | None = None
    content: str = "text"
    transform: Any = None
    transform_each: bool = False

    @property
    def marks(self) -> Marks | None:
        marks = Marks(self.open, self.close or "")
        has_both = 0 < len(marks.begin) <= _MAX_MARK_CHARS >= len(marks.end)
        return marks if has_both else None


def declared_syntax(response_template: object, recognised: MessageSyntax) -> MessageSyntax:
    """Return `recognised` with the marks that a template declares as literals.

    Args:
        response_template: the value in tokenizer_config.json, of any type.
        recognised: the syntax found in the chat template; it stays where nothing is declared.
    """
    fields = response_template.get("fields") if isinstance(response_template, dict) else None
    if not isinstance(fields, dict):
        return recognised
    reasoning = next(filter(None, (_reasoning(fields.get(name)) for name in _REASONING)), None)
    return msgspec.structs.replace(
        recognised,
        reasoning=reasoning or recognised.reasoning,
        tool_calls=_tool_calls(fields.get("tool_calls"), recognised.tool_calls),
    )


def _reasoning(value: object) -> Marks | None:
    field = _field(value)
    marks = field.marks if field else None
    return marks if marks and marks.end else None


def _tool_calls(value: object, recognised: ToolCallSyntax | None) -> ToolCallSyntax | None:
    field = _field(value)
    marks = field.marks if field else None
    if field is None or marks is None or field.content != "json":
        return recognised
    known = recognised if recognised and isinstance(recognised.call, JsonCall) else None
    if known is not None and (known.begin, known.end) == (marks.begin, marks.end):
        return known
    has_parameters = "parameters" in repr(field.transform)
    return ToolCallSyntax(
        begin=marks.begin,
        end=marks.end,
        call=JsonCall("parameters" if has_parameters else "arguments"),
        is_list=field.transform_each,
        space="" if field.transform_each else "\n",
        separator="\n",
    )


def _field(value: object) -> _Field | None:
    try:
        return msgspec.convert(value, _Field)
    except msgspec.ValidationError:
        return None
