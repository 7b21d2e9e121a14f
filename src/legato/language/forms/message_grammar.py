"""The grammar of a chat's answer, in Lark: of its tool calls, of its content's form, or of both."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from legato.core.errors import InvalidRequestError, naming_fields
from legato.core.structured_outputs import StructuredOutputs
from legato.language.forms.argument_grammar import ANY_TEXT, ArgumentGrammar, LarkText
from legato.language.forms.check import GrammarChecker
from legato.language.forms.source import check_schema, enforced, rule_of
from legato.language.message.message_syntax import (
    Channels,
    JsonCall,
    MessageSyntax,
    NamedCall,
    ToolCallSyntax,
)
from legato.language.message.tools import ToolFunction, ToolUse

MAX_PARALLEL_CALLS = 16
"""The most calls in a message that has only calls: small models do not stop on their own."""


class MessageForm(NamedTuple):
    """The grammar of an answer, and its syntax.

    Attributes:
        outputs: a grammar that compiles; None leaves the answer free.
        syntax: of the answer.
        may_think: whether the form leaves room for thoughts.
    """

    outputs: StructuredOutputs | None
    syntax: MessageSyntax
    may_think: bool = True


def message_form(
    use: ToolUse,
    outputs: StructuredOutputs | None,
    syntax: MessageSyntax,
    checker: GrammarChecker,
    special_marks: Mapping[str, int],
) -> MessageForm:
    """Return the form of an answer in its model's syntax.

    Args:
        use: of tools that the model was shown.
        outputs: the form of the answer's content; ignored if a call is required.
        syntax: with tool calls, if there are tools.
        special_marks: as of `Tokenizer.special_marks`.

    Raises:
        InvalidRequestError: the form cannot be enforced; `param` names its field.
    """
    form = None if use.is_required else outputs
    content = None if form is None else rule_of(form)
    _check_enforced(use.callable, checker, is_enforced=use.is_required or form is not None)
    grammar = None
    if form is None or content is not None:
        grammar = message_grammar(use, syntax, special_marks, content=content)
    if grammar is not None:
        outputs = _resolved(grammar, use, form, checker)
        return MessageForm(outputs, syntax if form is None else _with_marked_calls(syntax))
    if form is None:
        return MessageForm(None, syntax)
    # The form applies from the first token on, even if the prompt ends in open reasoning.
    answer = msgspec.structs.replace(_with_marked_calls(syntax), is_reasoning_open=False)
    return MessageForm(checker.resolve(form), answer, may_think=False)


def _resolved(
    grammar: str, use: ToolUse, form: StructuredOutputs | None, checker: GrammarChecker
) -> StructuredOutputs:
    """Return a message's grammar as one that compiles; if it does not, find the field at fault.

    Args:
        form: of the content, if the grammar has it as a part.
    """
    if form is not None:
        checker.check_part(form)
    try:
        return checker.resolve(StructuredOutputs(grammar=grammar))
    except InvalidRequestError as error:
        if form is not None:
            checker.resolve(form)
        _check_tools(use.callable, checker)
        param = "tools" if use.callable or form is None else f"structured_outputs.{form.form}"
        raise InvalidRequestError(str(error), param=param) from error


def _with_marked_calls(syntax: MessageSyntax) -> MessageSyntax:
    """Return the syntax of an answer in which an object without a mark is content of a form."""
    calls = syntax.tool_calls
    if calls is None or not calls.is_bare:
        return syntax
    return msgspec.structs.replace(syntax, tool_calls=msgspec.structs.replace(calls, is_bare=False))


def _check_enforced(
    functions: Sequence[ToolFunction], checker: GrammarChecker, *, is_enforced: bool
) -> None:
    """Check functions one by one, so that an error names the field.

    Args:
        is_enforced: whether the schema of a function that is not strict is enforced.

    Raises:
        InvalidRequestError: the grammar of a custom tool's input does not compile, or a schema that
            is enforced fails `check_schema`.
    """
    for function in functions:
        param = f"{function.place}.parameters"
        if function.input_grammar is not None:
            with naming_fields(**{"structured_outputs.grammar": param}):
                checker.resolve(StructuredOutputs(grammar=function.input_grammar))
        elif is_enforced or function.is_strict:
            check_schema(function.parameters, param)


def _check_tools(functions: Sequence[ToolFunction], checker: GrammarChecker) -> None:
    """Raises InvalidRequestError: a single function's schema cannot be enforced."""
    for function in functions:
        if function.parameters is None:
            continue
        schema = enforced(function.parameters, is_strict=function.is_strict)
        with naming_fields(**{"structured_outputs.json": f"{function.place}.parameters"}):
            checker.resolve(StructuredOutputs(json=schema))


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
    is_strict = any(function.is_strict for function in use.callable)
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
            written = arguments.of(tool, is_lenient=is_lenient)
            begin, end = _around_arguments(call, tool.name)
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


class ChannelGrammar:
    """Makes grammars of the text after `<|start|>assistant`. A call ends its message."""

    def __init__(self, use: ToolUse, marks: Channels, lark: LarkText) -> None:
        self._tools = use.callable
        self._marks = marks
        self._lark = lark

    def calls(self) -> str:
        return self._grammar("call", *self._call_rules(is_lenient=True))

    def calls_or(self, content: str) -> str:
        calls = self._call_rules(is_lenient=True)
        return self._grammar("(call | final content)", f"content: {content}", *calls)

    def reasoned(self, content: str) -> str:
        return self._grammar("final content", f"content: {content}")

    def free(self) -> str:
        end = f"(call | final {ANY_TEXT})"
        return self._grammar(f"said* {end}", *self._call_rules(is_lenient=False))

    def _grammar(self, last: str, *rules: str) -> str:
        """Return a grammar of reasoning and of what is last."""
        begin = self._lark.literal(f"{self._marks.start}assistant")
        return "\n".join(
            [
                f"start: thought? {last}",
                f"thought: {self._header('analysis')} rest {begin}",
                f"said: {self._header('commentary')} rest {begin}",
                f"final: {self._header('final')}",
                *self._lark.until("rest", self._marks.end),
                *rules,
            ]
        )

    def _header(self, channel: str) -> str:
        return self._lark.literal(f"{self._marks.channel}{channel}{self._marks.message}")

    def _call_rules(self, *, is_lenient: bool) -> list[str]:
        """Args: is_lenient: as of `ArgumentGrammar.of`."""
        arguments = ArgumentGrammar(None, self._lark)
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(self._tools)))]
        for i, tool in enumerate(self._tools):
            written = arguments.of(tool, is_lenient=is_lenient)
            recipient = f"commentary to=functions.{tool.name} "
            header = self._header(f"{recipient}{self._marks.constrain}json")
            rules.append(f"call_{i}: {header} {written}")
        return rules + arguments.rules
