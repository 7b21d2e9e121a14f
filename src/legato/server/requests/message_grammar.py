"""MessageGrammar of a model's messages and tool calls, in llguidance's Lark."""

import json
from collections.abc import Mapping
from typing import Protocol

from legato.server.requests.argument_grammar import ArgumentGrammar
from legato.server.requests.channel_grammar import ChannelGrammar
from legato.server.requests.lark_text import ANY_TEXT, LarkText
from legato.server.requests.tools import ToolUse
from legato.text.message_syntax import JsonCall, MessageSyntax, NamedCall, ToolCallSyntax

MAX_PARALLEL_CALLS = 16
"""The most calls in a message that has only calls: small models do not stop on their own."""


class MessageGrammar(Protocol):
    """The grammars of a model's messages."""

    def calls(self) -> str:
        """Reasoning, if any, then only calls; all schemas are enforced."""
        ...

    def calls_or(self, content: str) -> str:
        """As `calls`, or content of a form; it may begin like a call without a mark."""
        ...

    def reasoned(self, content: str) -> str | None:
        """Reasoning, then content of a form; None if the form may have no frame."""
        ...

    def free(self) -> str:
        """Any text and calls; strict tools' schemas are enforced."""
        ...


def message_grammar(
    use: ToolUse, syntax: MessageSyntax, special: Mapping[str, int], *, content: str | None = None
) -> str | None:
    """Return the grammar of a message; None if it is free.

    Args:
        special: key a special token in the syntax's marks, value its id.
        content: the right side of a rule for the content, if that has a form. Without tools and
            reasoning, such a form needs no grammar from here.

    Raises:
        InvalidRequestError: a tool's schema cannot be enforced in the syntax.
    """
    grammars: MessageGrammar
    if syntax.channels is not None:
        grammars = ChannelGrammar(use, syntax.channels, LarkText(special))
    else:
        grammars = MarkedGrammar(use, syntax, LarkText(special))
    if use.is_required:
        return grammars.calls()
    if content is not None:
        return grammars.calls_or(content) if use.callable else grammars.reasoned(content)
    is_strict = any(tool.function.strict for tool in use.callable)
    return grammars.free() if is_strict or not use.is_parallel else None


class MarkedGrammar:
    """Makes grammars of messages whose parts stand between marks, as `MessageGrammar`."""

    def __init__(self, use: ToolUse, syntax: MessageSyntax, lark: LarkText) -> None:
        self._tools = use.callable
        self._is_parallel = use.is_parallel
        self._syntax = syntax
        self._lark = lark

    def calls(self) -> str:
        calls = self._only_calls(is_bare=self._calls.is_bare)
        return _lark("start: thought calls", *self._thought(), *calls)

    def calls_or(self, content: str) -> str:
        start = ("start: thought (calls | content)", f"content: {content}")
        return _lark(*start, *self._thought(), *self._only_calls(is_bare=False))

    def reasoned(self, content: str) -> str | None:
        if self._syntax.reasoning is None:
            return None
        return _lark("start: thought content", f"content: {content}", *self._thought())

    def free(self) -> str:
        rules = self._body() + self._call_rules(is_lenient=False)
        if self._calls.is_bare:
            return _lark("start: body | text", r"text: /\s*/ | /\s*[^\s{](?s:.*)/", *rules)
        return _lark(
            f"start: {'(lead body)* text' if self._is_parallel else 'lead body | text'}",
            f"text: {ANY_TEXT}",
            *self._lark.until("lead", self._calls.begin),
            *rules,
        )

    @property
    def _calls(self) -> ToolCallSyntax:
        assert self._syntax.tool_calls is not None, "no tools without it"
        return self._syntax.tool_calls

    def _only_calls(self, *, is_bare: bool) -> list[str]:
        begin = "" if is_bare else f"{self._lark.literal(self._calls.begin)} "
        if self._calls.is_list or self._calls.is_bare or self._calls.is_shared:
            rules = [f"calls: {begin}body"]
        else:
            sections = self._several("section", self._calls.separator)
            rules = [f"calls: {sections}", f"section: {begin}body"]
        return [*rules, *self._body(), *self._call_rules(is_lenient=True)]

    def _thought(self) -> list[str]:
        reasoning = self._syntax.reasoning
        if reasoning is None:
            return ['thought: ""']
        rest = "rest /[ \\n]{0,4}/"
        begun = f"({self._lark.literal(reasoning.begin)} {rest})?"
        return [
            f"thought: {rest if self._syntax.is_reasoning_open else begun}",
            *self._lark.until("rest", reasoning.end),
        ]

    def _body(self) -> list[str]:
        """Return the rule for a section after its mark."""
        calls = self._calls
        if calls.is_list:
            body = f'"[" {self._several("call", ", ")} "]"'
        elif calls.is_bare or calls.is_shared:
            body = self._several("call", calls.separator)
        else:
            body = "call"
        space = self._lark.literal(calls.space)
        return [f"body: {space} {body} {space} {self._lark.literal(calls.end)}"]

    def _call_rules(self, *, is_lenient: bool) -> list[str]:
        """Args: is_lenient: enforce a tool's schema as far as possible even if it is not strict."""
        call = self._calls.call
        arguments = ArgumentGrammar(call if isinstance(call, NamedCall) else None, self._lark)
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(self._tools)))]
        for i, tool in enumerate(self._tools):
            written = arguments.of(tool.function, is_lenient=is_lenient)
            begin, end = _around_arguments(call, tool.function.name)
            id_number = " /[0-9]{1,4}/ " if isinstance(call, NamedCall) and call.id_pattern else " "
            head = id_number.join(map(self._lark.literal, begin))
            rules.append(f"call_{i}: {head} {written} {self._lark.literal(end)}")
        return rules + arguments.rules

    def _several(self, rule: str, separator: str) -> str:
        if not self._is_parallel:
            return rule
        more = f"({self._lark.literal(separator)} {rule})" if separator else rule
        return f"{rule} {more}{{0,{MAX_PARALLEL_CALLS - 1}}}"


def _around_arguments(call: JsonCall | NamedCall, name: str) -> tuple[list[str], str]:
    """Return the text before a call's arguments, without the number of its id, and after them."""
    if isinstance(call, JsonCall):
        return [f'{{"name": {json.dumps(name)}, "{call.arguments_key}": '], "}"
    if call.id_pattern:
        return [f"{call.begin}{name}{call.id_begin}", call.name_end], call.end
    return [f"{call.begin}{name}{call.name_end}"], call.end


def _lark(*rules: str) -> str:
    return "\n".join(rules)
