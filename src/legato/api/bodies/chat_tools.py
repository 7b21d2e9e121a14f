"""Tools that a model may call, as described by clients."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

from legato.api.bodies.body_model import AtMost, Name, PartError, RequestModel, only
from legato.api.limits import MAX_TOOL_NAME_CHARS, MAX_TOOLS, MAX_TOOLS_CHARS
from legato.core.errors import InvalidRequestError
from legato.language.conversation.prompt import tools_for_template
from legato.language.forms.schema_walk import ENDLESS, endless_place, excess
from legato.language.message.tools import ToolFunction, ToolUse

_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_SCHEMA = (
    "items",
    "additionalProperties",
    "propertyNames",
    "contains",
    "not",
    "if",
    "then",
    "else",
)
_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")

_Path = tuple[str | int, ...]


def _checked_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise PartError('must be "object": arguments have names', "type")
    too_large = excess(schema)
    if too_large is not None:
        raise ValueError(too_large)
    # Not recursive: a schema may nest as deeply as JSON.
    unread: list[tuple[_Path, Any]] = [((), schema)]
    while unread:
        path, part = unread.pop()
        if not isinstance(part, dict | bool):
            raise PartError("must be a JSON schema: an object or a boolean", *path)
        if isinstance(part, dict):
            _check_keywords(path, part)
            unread += _parts(path, part)
    place = endless_place(schema)
    if place is not None:
        raise ValueError(f"{ENDLESS}, at {place}")
    return schema


def _check_keywords(path: _Path, schema: dict[str, Any]) -> None:
    types = schema.get("type", [])
    for name in types if isinstance(types, list) else [types]:
        if not isinstance(name, str) or name not in _TYPES:
            raise PartError(f"must be one of {', '.join(sorted(_TYPES))}", *path, "type")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise PartError("must be a list of names", *path, "required")
    if not isinstance(schema.get("enum", []), list):
        raise PartError("must be a list", *path, "enum")


def _parts(path: _Path, schema: dict[str, Any]) -> Iterator[tuple[_Path, Any]]:
    """Yield the schemas within a schema, with their paths."""
    for key in schema.keys() & {*_SCHEMA, *_SCHEMAS, *_NAMED_SCHEMAS}:
        value = schema[key]
        if key in _SCHEMA and not isinstance(value, list):
            yield (*path, key), value
        elif key in _NAMED_SCHEMAS:
            if not isinstance(value, dict):
                raise PartError("must be an object of schemas", *path, key)
            yield from (((*path, key, name), part) for name, part in value.items())
        else:
            if not isinstance(value, list):
                raise PartError("must be a list of schemas", *path, key)
            yield from (((*path, key, i), part) for i, part in enumerate(value))


class FunctionDefinition(RequestModel):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]+$"), AtMost(MAX_TOOL_NAME_CHARS)]
    """Letters, digits, `_`, `.` and `-`."""
    description: str | None = None
    """For the chat template."""
    parameters: Annotated[dict[str, Any], AfterValidator(_checked_parameters)] | None = None
    """JSON schema of the arguments; by default, there are none."""
    strict: bool = False
    """Hold every call to the schema; required calls always are."""
    _input_grammar: str | None = PrivateAttr(default=None)

    @property
    def input_grammar(self) -> str | None:
        """Of a function that stands for a custom tool: the Lark grammar of its only argument."""
        return self._input_grammar

    @input_grammar.setter
    def input_grammar(self, grammar: str | None) -> None:
        self._input_grammar = grammar

    def plain(self, place: str) -> ToolFunction:
        """Return it in plain data. Args: place: its path in the request."""
        return ToolFunction(
            name=self.name,
            description=self.description,
            parameters=self.parameters,
            is_strict=self.strict,
            input_grammar=self.input_grammar,
            place=place,
        )


class Tool(RequestModel):
    type: Annotated[str, only("function")]
    """Only functions are supported."""
    function: FunctionDefinition
    """The function."""


def functions_of(tools: Sequence[Tool]) -> list[ToolFunction]:
    """Return the functions of tools in plain data. Their path in the request is `tools`."""
    return [tool.function.plain(f"tools.{i}.function") for i, tool in enumerate(tools)]


def _checked_tools(tools: list[Tool]) -> list[Tool]:
    names = [tool.function.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise PartError(f"the name {name!r} is given twice", i, "function", "name")
    num_chars = len(msgspec.json.encode(tools_for_template(functions_of(tools))))
    if num_chars > MAX_TOOLS_CHARS:
        raise ValueError(f"has {num_chars} characters, over {MAX_TOOLS_CHARS}")
    return tools


Tools = Annotated[
    list[Tool], Field(fail_fast=True), AfterValidator(_checked_tools), AtMost(MAX_TOOLS)
]
Functions = Annotated[list[FunctionDefinition], Field(fail_fast=True), AtMost(MAX_TOOLS)]


def described_tool(
    name: str, parameters: dict[str, Any] | None, description: str | None, *, strict: bool | None
) -> dict[str, Any]:
    """Return a `Tool` in JSON's form."""
    function = {
        "name": name,
        "description": description,
        "parameters": parameters,
        "strict": strict,
    }
    return {"type": "function", "function": function}


def named_tool(name: str | None) -> dict[str, Any]:
    """Return a `NamedTool` in JSON's form."""
    return {"type": "function", "function": {"name": name}}


class FunctionName(RequestModel):
    name: Name


class NamedTool(RequestModel):
    type: Annotated[str, only("function")]
    function: FunctionName


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, fail_fast=True), AtMost(MAX_TOOLS)]


class Choice(RequestModel):
    """`tool_choice`; a choice in one word is its type."""

    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _check_type(self) -> "Choice":
        for name in ("function", "allowed_tools"):
            is_sent = getattr(self, name) is not None
            if is_sent != (self.type == name):
                wrong = f"goes with type: {name} only" if is_sent else "is missing"
                raise PartError(wrong, name)
        return self

    @property
    def needs_tools(self) -> bool:
        """Whether the choice cannot be kept without tools."""
        return self.is_required or self.names is not None

    @property
    def is_required(self) -> bool:
        if self.allowed_tools is not None:
            return self.allowed_tools.mode == "required"
        return self.type in ("required", "function")

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the functions that may be called; None allows all."""
        if self.allowed_tools is not None:
            return tuple(dict.fromkeys(tool.function.name for tool in self.allowed_tools.tools))
        return None if self.function is None else (self.function.name,)


def _as_choice(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value not in _WORDS:
        raise ValueError(f"must be one of {', '.join(map(repr, _WORDS))}, or name a function")
    return {"type": value}


def _as_function_choice(value: Any) -> Any:
    """Convert OpenAI's older form, `function_call`."""
    if isinstance(value, dict):
        return {"type": "function", "function": value}
    return _as_choice(value)


_WORDS = ("none", "auto", "required")
_NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_NAMED = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _NAME},
    "required": ["type", "function"],
}
_ALLOWED = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": _NAMED, "minItems": 1, "maxItems": MAX_TOOLS},
            },
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}

ToolChoice = Annotated[
    Choice,
    BeforeValidator(_as_choice),
    WithJsonSchema({"anyOf": [{"enum": list(_WORDS)}, _NAMED, _ALLOWED]}),
]
FunctionChoice = Annotated[
    Choice,
    BeforeValidator(_as_function_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto"]}, _NAME]}),
]


def tool_use(
    tools: Sequence[ToolFunction], choice: Choice | None, *, is_parallel: bool, param: str
) -> ToolUse:
    """Args: param: the client's name of `choice`.

    Raises:
        InvalidRequestError: the choice names a function that is not among the tools.
    """
    if not tools or (choice is not None and choice.type == "none"):
        return ToolUse()
    by_name = {tool.name: tool for tool in tools}
    named = None if choice is None else choice.names
    names = tuple(by_name) if named is None else named
    for name in names:
        if name not in by_name:
            raise InvalidRequestError(f"there is no tool {name!r} in tools", param=param)
    chosen = tuple(by_name[name] for name in names)
    is_restricted = choice is not None and choice.type == "allowed_tools"
    return ToolUse(
        shown=chosen if is_restricted else tuple(tools),
        callable=chosen,
        is_required=choice is not None and choice.is_required,
        is_parallel=is_parallel and (choice is None or choice.function is None),
    )
