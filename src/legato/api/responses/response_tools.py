"""Tools of OpenAI's Responses API, and their conversion to a chat's functions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from llguidance import regex_to_lark
from pydantic import BeforeValidator, ConfigDict, Field, Tag, WithJsonSchema, model_validator

from legato.api.bodies.body_model import (
    AtMost,
    LenientModel,
    Name,
    PartError,
    RequestModel,
    by_type,
    only,
)
from legato.api.bodies.chat_tools import described_tool, named_tool
from legato.api.limits import MAX_TOOLS
from legato.core.errors import InvalidRequestError
from legato.language.message.tools import CUSTOM_INPUT

_HOSTED = (
    *("web_search", "web_search_2025_08_26"),
    *("web_search_preview", "web_search_preview_2025_03_11"),
    *("file_search", "code_interpreter", "image_generation", "mcp", "tool_search"),
    "programmatic_tool_calling",
    *("computer", "computer_use", "computer_use_preview", "local_shell", "shell", "apply_patch"),
)
_SEPARATOR = "__"

_Callers = Annotated[list[str], only(["direct"]), AtMost(1)]


class CalledTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of the Responses API that the model knows as a function of another name or form.

    Attributes:
        is_custom: its input is a text, which the function takes as its only argument.
    """

    name: str
    namespace: str | None
    is_custom: bool


class FunctionTool(RequestModel):
    """A function that the model may call."""

    type: Literal["function"]
    """Kind of tool."""
    name: Name
    """The tool's name."""
    description: str | None = None
    """Shown to the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None
    """Hold every call to the schema."""
    output_schema: dict[str, Any] | None = None
    """Changes nothing: results come from the client."""
    defer_loading: bool | None = None
    """Changes nothing: the model knows all tools."""
    allowed_callers: _Callers | None = None
    """The model alone calls tools."""

    def shown(self) -> dict[str, Any]:
        # Clients expect these three even if they are null.
        names = ("description", "parameters", "strict")
        always = {name: getattr(self, name) for name in names}
        return {**self.model_dump(exclude_none=True), **always}

    def described(self, name: str) -> dict[str, Any]:
        """Return a chat's tool. Args: name: by which the model knows it."""
        return described_tool(name, self.parameters, self.description, strict=self.strict)


class InputFormat(RequestModel):
    """Form of a tool's input; `syntax` and `definition` are for "grammar" only."""

    type: Literal["text", "grammar"]
    """Kind of text."""
    syntax: Literal["lark", "regex"] | None = None
    """Syntax of the definition."""
    definition: str | None = None
    """Regular expression, or grammar in Lark."""

    @property
    def lark(self) -> str | None:
        """The grammar in Lark; None for any text."""
        if self.syntax == "regex":
            return f"start: /{regex_to_lark(self.definition or '', 'd')}/"
        return self.definition

    @model_validator(mode="after")
    def _check_together(self) -> "InputFormat":
        given = [self.syntax is not None, self.definition is not None]
        if given != [self.type == "grammar"] * 2:
            raise ValueError("syntax and definition go with type: grammar, which needs both")
        return self


class CustomTool(RequestModel):
    """A tool whose input is a text.

    The model knows it as a function with one text, and is shown the grammar, which is enforced.
    """

    type: Literal["custom"]
    """Kind of tool."""
    name: Name
    """The tool's name."""
    description: str | None = None
    """Shown to the model."""
    format: InputFormat | None = None
    """Any text, or that of a regular expression or a Lark grammar."""
    defer_loading: bool | None = None
    """Changes nothing: the model knows all tools."""
    allowed_callers: _Callers | None = None
    """The model alone calls tools."""

    def shown(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)

    def described(self, name: str) -> dict[str, Any]:
        """Return a chat's tool. Args: name: by which the model knows it."""
        text: dict[str, Any] = {"type": "string"}
        description = self.description or ""
        form = self.format
        if form is not None and form.definition is not None:
            description += f"\n\nThe input follows this grammar ({form.syntax}):\n{form.definition}"
        parameters = {
            "type": "object",
            "properties": {CUSTOM_INPUT: text},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        }
        return described_tool(name, parameters, description.strip() or None, strict=True)


CallableTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")],
    *by_type("a tool", "function", "custom"),
]


class NamespaceTool(RequestModel):
    """Tools whose names the model knows with the namespace's before them."""

    type: Literal["namespace"]
    """Kind of tool."""
    name: Name
    """Put before the tools' names."""
    description: str | None = None
    """Changes nothing: the model is not shown it."""
    tools: Annotated[list[CallableTool], Field(fail_fast=True), AtMost(MAX_TOOLS)]
    """Functions and custom tools."""

    def shown(self) -> dict[str, Any]:
        # Clients expect a description.
        tools = [one.shown() for one in self.tools]
        return {**self.model_dump(), "description": self.description or "", "tools": tools}


class HostedTool(LenientModel):
    """A tool that OpenAI's servers run, or that only their models know; it is left out."""

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, WithJsonSchema({"enum": list(_HOSTED)})]

    def shown(self) -> dict[str, Any]:
        return self.model_dump()


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    *by_type("a tool", "function", "custom", "namespace", **dict.fromkeys(_HOSTED, "hosted")),
]


def called_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a tool."""
    if namespace is None:
        return name
    return f"{namespace.removesuffix(_SEPARATOR)}{_SEPARATOR}{name}"


class OfferedTools(msgspec.Struct, frozen=True):
    """The tools of a request as functions of a chat.

    Attributes:
        functions: a chat's `tools`.
        names: the client's names of their fields; key and value are paths.
        renamed: the tools that the model knows in another form; key its name of them.
        left_out: types of the tools that are not offered to the model.
        input_grammars: Lark grammars of custom tools' inputs; key the model's name of the tool.
    """

    functions: list[dict[str, Any]]
    names: dict[str, str]
    renamed: dict[str, CalledTool]
    left_out: tuple[str, ...]
    input_grammars: dict[str, str]

    @classmethod
    def of(cls, tools: Sequence[Any]) -> "OfferedTools":
        """Args: tools: each a `ResponseTool`."""
        left_out = tuple(t.type for t in tools if isinstance(t, HostedTool))
        offered = cls([], {}, {}, left_out, {})
        for place, namespace, tool in _callable(tools):
            name = called_name(tool.name, namespace)
            is_custom = isinstance(tool, CustomTool)
            if isinstance(tool, CustomTool) and tool.format is not None and tool.format.lark:
                offered.input_grammars[name] = tool.format.lark
            function = f"tools.{len(offered.functions)}.function"
            offered.functions.append(tool.described(name))
            offered.names[function] = place
            if is_custom:
                offered.names[f"{function}.parameters"] = f"{place}.format"
            if is_custom or namespace is not None:
                called = CalledTool(name=tool.name, namespace=namespace, is_custom=is_custom)
                offered.renamed.setdefault(name, called)
        return offered

    def choice(self, choice: Any) -> Any:
        """Return a chat's `tool_choice` for one of a response.

        Raises:
            InvalidRequestError: it requires a tool that is left out.
        """
        match choice:
            case str():
                if choice == "required" and not self.functions and self.left_out:
                    self._refuse_required(self.left_out)
                return choice
            case {"type": "allowed_tools", "mode": mode, "tools": tools}:
                names = [_chosen_name(tool) for tool in tools if tool["type"] not in _HOSTED]
                if names:
                    allowed = {"mode": mode, "tools": list(map(named_tool, names))}
                    return {"type": "allowed_tools", "allowed_tools": allowed}
                if mode == "required":
                    self._refuse_required([tool["type"] for tool in tools])
                return "none"
            case {"type": kind} if kind in _HOSTED:
                self._refuse_required([kind])
        return named_tool(_chosen_name(choice))

    @staticmethod
    def _refuse_required(kinds: Sequence[str]) -> NoReturn:
        raise InvalidRequestError(
            f"tool_choice requires a tool that this server cannot run: {', '.join(kinds)}",
            param="tool_choice",
            code="unsupported_parameter",
        )


def _callable(tools: Sequence[Any]) -> Iterator[tuple[str, str | None, FunctionTool | CustomTool]]:
    """Yield each tool that the model may call, with the client's name of it and its namespace."""
    for i, tool in enumerate(tools):
        if isinstance(tool, NamespaceTool):
            for k, inner in enumerate(tool.tools):
                yield f"tools.{i}.tools.{k}", tool.name, inner
        elif not isinstance(tool, HostedTool):
            yield f"tools.{i}", None, tool


_NAMED = {
    "type": "object",
    "properties": {
        "type": {"enum": ["function", "custom"]},
        "name": {"type": "string"},
        "namespace": {"type": "string"},
    },
    "required": ["type", "name"],
}
_TYPED = {"type": "object", "properties": {"type": {"enum": list(_HOSTED)}}, "required": ["type"]}
_ALLOWED = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "items": {"anyOf": [_NAMED, _TYPED]}, "minItems": 1},
    },
    "required": ["type", "mode", "tools"],
}
_MODES = ("none", "auto", "required")


def _check_one_tool(value: Any, *path: str | int) -> None:
    """Raises `PartError` if a value names no tool. Args: path: where it stands in the choice."""
    match value:
        case {"type": "function" | "custom"}:
            if not isinstance(value.get("name"), str):
                raise PartError("must be the name of a tool", *path, "name")
            if not isinstance(value.get("namespace", ""), str | None):
                raise PartError("must be a name", *path, "namespace")
        case {"type": str() as kind} if kind in _HOSTED:
            return
        case _:
            raise PartError('must be "none", "auto", "required", a tool, or allowed tools', *path)


def _checked_choice(value: Any) -> Any:
    if isinstance(value, str) and value in _MODES:
        return value
    if not isinstance(value, dict) or value.get("type") != "allowed_tools":
        _check_one_tool(value)
        return value
    if value.get("mode") not in ("auto", "required"):
        raise PartError('must be "auto" or "required"', "mode")
    tools = value.get("tools")
    if not isinstance(tools, list) or not tools:
        raise PartError("must be a list of at least one tool", "tools")
    for i, tool in enumerate(tools):
        _check_one_tool(tool, "tools", i)
    return value


def _chosen_name(choice: Mapping[str, Any]) -> str:
    return called_name(choice["name"], choice.get("namespace"))


ResponseToolChoice = Annotated[
    Any,
    BeforeValidator(_checked_choice),
    WithJsonSchema({"anyOf": [{"enum": list(_MODES)}, _NAMED, _TYPED, _ALLOWED]}),
]
