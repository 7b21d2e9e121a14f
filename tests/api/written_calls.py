"""Tool calls as a model writes them."""

import json
import re
from typing import Any

from legato.language.message.message_syntax import (
    ArgumentTags,
    ArgumentType,
    JsonCall,
    MessageSyntax,
    NamedCall,
    ToolCallSyntax,
    ToolParameters,
)

Call = tuple[str, dict[str, Any]]
"""The name and the arguments."""

_KINDS = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def written(syntax: ToolCallSyntax | MessageSyntax, *calls: Call) -> str:
    """Calls by their names and arguments, each in the syntax."""
    if isinstance(syntax, MessageSyntax):
        [(name, arguments)] = calls  # harmony has one call a message
        header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        return f"{header}{json.dumps(arguments)}"
    texts = [_written_call(syntax.call, i, *call) for i, call in enumerate(calls)]
    if syntax.is_list:
        return f"{syntax.begin}[{', '.join(texts)}]{syntax.end}"
    if syntax.is_bare:
        return syntax.separator.join(texts)
    if syntax.is_shared:
        texts = [syntax.separator.join(texts)]
    sections = [f"{syntax.begin}{syntax.space}{text}{syntax.space}{syntax.end}" for text in texts]
    return syntax.separator.join(sections)


def tools_of(*calls: Call) -> dict[str, ToolParameters]:
    """The tools of some calls, with the types of their arguments."""
    return {
        name: ToolParameters(named={key: _type_of(value) for key, value in arguments.items()})
        for name, arguments in calls
    }


def _type_of(value: Any) -> ArgumentType:
    if isinstance(value, str):
        return ArgumentType(is_text=True)
    return ArgumentType(kinds=(_KINDS.get(type(value), "null"),))


def _written_call(call: JsonCall | NamedCall, i: int, name: str, arguments: dict[str, Any]) -> str:
    if isinstance(call, JsonCall):
        return json.dumps({"name": name, call.arguments_key: arguments})
    if call.id_pattern:
        name += f":{i}"
    return f"{call.begin}{name}{call.name_end}{_written_arguments(call, arguments)}{call.end}"


def _written_arguments(call: NamedCall, arguments: dict[str, Any]) -> str:
    if call.arguments == "json":
        return json.dumps(arguments)
    if call.arguments == "python":
        return f"({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"
    if call.arguments == "gemma":
        return _gemma(arguments)
    tags = call.arguments
    assert isinstance(tags, ArgumentTags)
    return tags.space + "".join(_tagged(tags, key, value) for key, value in arguments.items())


def _tagged(tags: ArgumentTags, key: str, value: Any) -> str:
    is_text = isinstance(value, str)
    attribute = f"{tags.text_attribute}{json.dumps(is_text)}" if tags.text_attribute else ""
    between = f"{tags.space}{tags.value_begin}" if tags.value_begin else ""
    text = value if is_text else json.dumps(value)
    begin = f"{tags.begin}{key}{attribute}{tags.name_end}{between}"
    return f"{begin}{tags.padding}{text}{tags.padding}{tags.end}{tags.space}"


def _python(value: Any) -> str:
    """A literal with the double quotes that models prefer."""
    return json.dumps(value) if isinstance(value, str | list | dict) else repr(value)


def _gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        items = (
            (key if re.fullmatch(r"\w+", key) else _gemma(key), value[key]) for key in sorted(value)
        )
        return "{" + ",".join(f"{key}:{_gemma(inner)}" for key, inner in items) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return json.dumps(value)
