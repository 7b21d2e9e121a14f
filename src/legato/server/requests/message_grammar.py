"""Grammars of a model's messages and tool calls, in llguidance's Lark."""

import json
from collections.abc import Callable
from typing import Any

from legato.grammar.json_schema import guided
from legato.server.requests.tools import ToolUse
from legato.text.message_syntax import MessageSyntax, ToolCallSyntax

Token = Callable[[str], int | None]
"""Returns the id of a special token's text; None for any other text."""

MAX_PARALLEL_CALLS = 16
"""The most calls in a message that has only calls: small models do not stop on their own."""

_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_TEXT = "/(?s:.*)/"
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


def message_grammar(
    use: ToolUse, syntax: MessageSyntax, token: Token, *, content: str | None = None
) -> str | None:
    """Return the grammar of a message; None if it is free.

    Args:
        token: as of `MessageGrammar`.
        content: the right side of a rule for the content, if that has a form. Without tools and
            reasoning, such a form needs no grammar from here.
    """
    grammar = MessageGrammar(use, syntax, token)
    if use.is_required:
        return grammar.calls()
    if content is not None:
        return grammar.calls_or(content) if use.callable else grammar.reasoned(content)
    is_strict = any(tool.function.strict for tool in use.callable)
    return grammar.free() if is_strict or not use.is_parallel else None


class MessageGrammar:
    """Makes grammars of messages in a model's own syntax.

    Args:
        token: finds the special token of a mark; text cannot match a special token.
    """

    def __init__(self, use: ToolUse, syntax: MessageSyntax, token: Token) -> None:
        self._tools = use.callable
        self._is_parallel = use.is_parallel
        self._syntax = syntax
        self._token = token

    def calls(self) -> str:
        """Reasoning, if any, then only calls; all schemas are enforced."""
        calls = self._only_calls(is_bare=self._calls.is_bare)
        return _lark("start: thought calls", *self._thought(), *calls)

    def calls_or(self, content: str) -> str:
        """As `calls`, or content of a form; it may begin like a call without a mark."""
        start = ("start: thought (calls | content)", f"content: {content}")
        return _lark(*start, *self._thought(), *self._only_calls(is_bare=False))

    def reasoned(self, content: str) -> str | None:
        """Reasoning, then content of a form; None if the model does not reason."""
        if self._syntax.reasoning is None:
            return None
        return _lark("start: thought content", f"content: {content}", *self._thought())

    def free(self) -> str:
        """Any text and calls; strict tools' schemas are enforced."""
        rules = self._body() + self._call_rules(is_lenient=False)
        if self._calls.is_bare:
            return _lark("start: body | text", r"text: /\s*/ | /\s*[^\s{](?s:.*)/", *rules)
        start = "(lead body)* text" if self._is_parallel else "lead body | text"
        is_special = self._token(self._calls.begin) is not None
        lead = "lead" if is_special else "lead[lazy]"
        return _lark(
            f"start: {start}",
            f"text: {_ANY_TEXT}",
            f"{lead}: {_ANY_TEXT} {self._mark(self._calls.begin)}",
            *rules,
        )

    @property
    def _calls(self) -> ToolCallSyntax:
        assert self._syntax.tool_calls is not None, "no tools without it"
        return self._syntax.tool_calls

    def _only_calls(self, *, is_bare: bool) -> list[str]:
        begin = "" if is_bare else f"{self._mark(self._calls.begin)} "
        if self._calls.is_list or self._calls.is_bare:
            rules = [f"calls: {begin}body"]
        else:
            sections = self._several("section", self._calls.separator)
            rules = [f"calls: {sections}", f"section: {begin}body"]
        return [*rules, *self._body(), *self._call_rules(is_lenient=True)]

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
        """Return the rule for a section after its mark."""
        if self._calls.is_list:
            return [f'body: "[" {self._several("call", ", ")} "]"']
        if self._calls.is_bare:
            return [f"body: {self._several('call', self._calls.separator)}"]
        if self._calls.name_end:
            return ["body: call"]
        return [f'body: "\\n" call "\\n" {self._mark(self._calls.end)}']

    def _call_rules(self, *, is_lenient: bool) -> list[str]:
        """Args: is_lenient: enforce a tool's schema as far as possible even if it is not strict."""
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(self._tools)))]
        for i, tool in enumerate(self._tools):
            function = tool.function
            schema = _ANY_OBJECT
            if function.strict or is_lenient:
                schema = function.parameters or _NOTHING
            schema = guided(schema, _JSON_OPTIONS, is_lenient=not function.strict)
            rules.append(f"call_{i}: {self._head(function.name)} args_{i} {self._tail()}")
            rules.append(f"args_{i}: %json {json.dumps(schema)}")
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
        more = f"({_text(separator)} {rule})" if separator else rule
        return f"{rule} {more}{{0,{MAX_PARALLEL_CALLS - 1}}}"

    def _mark(self, mark: str) -> str:
        token_id = self._token(mark)
        return _text(mark) if token_id is None else f"<[{token_id}]>"


def _lark(*rules: str) -> str:
    return "\n".join(rules)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
