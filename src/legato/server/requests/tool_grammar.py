"""Grammars of tool calls, in llguidance's dialect of Lark: what a model is held to."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from legato.model.message_syntax import MessageSyntax
from legato.server.requests.tools import Tool, ToolUse

Token = Callable[[str], int | None]
"""Id of a text that is a special token, None of any other."""

_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_TEXT = "/(?s:.*)/"
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
_OPENING = frozenset(
    {
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref"),
        *("allOf", "anyOf", "oneOf", "if", "dependentSchemas"),
    }
)


def tool_grammar(use: ToolUse, syntax: MessageSyntax, token: Token) -> str | None:
    """What a message is held to by what it may call; None where it is free.

    Args:
        token: as of `ToolGrammar`.
    """
    if syntax.tool_calls is None:
        return None
    grammar = ToolGrammar(use.callable, syntax, is_parallel=use.is_parallel, token=token)
    if use.is_required:
        return grammar.required()
    is_strict = any(tool.function.strict for tool in use.callable)
    return grammar.free() if is_strict or not use.is_parallel else None


class ToolGrammar:
    """Grammars of messages that call these tools in a model's own syntax.

    Args:
        syntax: with tool calls.
        is_parallel: whether there may be several calls.
        token: what a mark of the syntax is; text cannot stand for one that is a special token.
    """

    def __init__(
        self, tools: Sequence[Tool], syntax: MessageSyntax, *, is_parallel: bool, token: Token
    ) -> None:
        assert syntax.tool_calls is not None
        self._tools = tools
        self._syntax = syntax
        self._calls = syntax.tool_calls
        self._is_parallel = is_parallel
        self._token = token

    def required(self) -> str:
        """Calls and nothing else, but for reasoning before them; all schemas hold."""
        rules = ["start: thought calls", *self._thought()]
        begin = "" if self._calls.is_bare else self._mark(self._calls.begin)
        if self._has_sections:
            rules.append(f"calls: {self._several('section', self._calls.separator)}")
            rules.append(f"section: {begin} body")
        else:
            rules.append(f"calls: {begin} body")
        return "\n".join([*rules, *self._body(), *self._call_rules(is_lenient=True)])

    def free(self) -> str:
        """Any text, and calls, of which those of strict tools hold to their schemas."""
        rules = self._body() + self._call_rules(is_lenient=False)
        if self._calls.is_bare:
            return "\n".join(["start: body | text", 'text: /[^{](?s:.*)/ | ""', *rules])
        start = "(lead body)* text" if self._is_parallel else "lead body | text"
        is_special = self._token(self._calls.begin) is not None
        lead = "lead" if is_special else "lead[lazy]"
        return "\n".join(
            [
                f"start: {start}",
                f"text: {_ANY_TEXT}",
                f"{lead}: {_ANY_TEXT} {self._mark(self._calls.begin)}",
                *rules,
            ]
        )

    @property
    def _has_sections(self) -> bool:
        """Whether each call has its own."""
        return not (self._calls.is_list or self._calls.is_bare)

    def _thought(self) -> list[str]:
        reasoning = self._syntax.reasoning
        if reasoning is None:
            return ['thought: ""']
        end = self._mark(reasoning.end)
        rest = "rest" if self._token(reasoning.end) is not None else "rest[lazy]"
        begin = "" if self._syntax.is_reasoning_open else f"{self._mark(reasoning.begin)} "
        whole = f"{begin}rest /[ \\n]{{0,4}}/"
        return [
            f"thought: {whole}" if self._syntax.is_reasoning_open else f"thought: ({whole})?",
            f"{rest}: {_ANY_TEXT} {end}",
        ]

    def _body(self) -> list[str]:
        """What stands behind a section's mark."""
        if self._calls.is_list:
            return [f'body: "[" {self._several("call", ", ")} "]"']
        if self._calls.is_bare:
            return [f"body: {self._several('call', self._calls.separator)}"]
        if self._calls.name_end:
            return ["body: call"]
        return [f'body: "\\n" call "\\n" {self._mark(self._calls.end)}']

    def _call_rules(self, *, is_lenient: bool) -> list[str]:
        """Args: is_lenient: hold to the schema of a tool that is not strict as far as may be."""
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(self._tools)))]
        for i, tool in enumerate(self._tools):
            function = tool.function
            schema = _ANY_OBJECT
            if function.strict or is_lenient:
                schema = _closed(function.parameters or _NOTHING)
            options = _JSON_OPTIONS | {"lenient": not function.strict}
            rules.append(f"call_{i}: {self._head(function.name)} args_{i} {self._tail()}")
            rules.append(f"args_{i}: %json {json.dumps({**schema, 'x-guidance': options})}")
        return rules

    def _head(self, name: str) -> str:
        if self._calls.name_end:
            return f"{_text(name)} {self._mark(self._calls.name_end)}"
        return _text(f'{{"name": {json.dumps(name)}, "{self._calls.arguments_key}": ')

    def _tail(self) -> str:
        return "" if self._calls.name_end else _text("}")

    def _several(self, rule: str, separator: str) -> str:
        if not self._is_parallel:
            return rule
        return f"{rule} ({_text(separator)} {rule})*" if separator else f"{rule}+"

    def _mark(self, mark: str) -> str:
        token_id = self._token(mark)
        return _text(mark) if token_id is None else f"<[{token_id}]>"


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without arguments that it does not name, which small models never stop to add."""
    if "properties" not in schema or schema.keys() & _OPENING:
        return schema
    return {**schema, "additionalProperties": False}


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
