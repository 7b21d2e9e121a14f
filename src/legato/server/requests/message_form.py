"""The grammar of a chat's answer: of its tool calls, of its content's form, or of both."""

from collections.abc import Mapping, Sequence

import msgspec

from legato.core.errors import InvalidRequestError
from legato.core.structured_outputs import StructuredOutputs
from legato.grammar.check import GrammarChecker
from legato.grammar.source import rule_of
from legato.server.http.errors import naming_fields
from legato.server.requests.chat import ChatRequest
from legato.server.requests.message_grammar import message_grammar
from legato.server.requests.output_form import enforced
from legato.server.requests.tools import Tool
from legato.text.message_syntax import MessageSyntax


class MessageForm(msgspec.Struct, frozen=True):
    """The grammar of an answer, and its syntax.

    Attributes:
        outputs: a grammar that compiles; None leaves the answer free.
        syntax: of the answer.
    """

    outputs: StructuredOutputs | None
    syntax: MessageSyntax


def message_form(
    request: ChatRequest,
    syntax: MessageSyntax,
    checker: GrammarChecker,
    special_marks: Mapping[str, int],
) -> MessageForm:
    """Return the form that a request asks for, in its model's syntax.

    Args:
        syntax: with tool calls, if the model was shown tools.
        special_marks: as of `Tokenizer.special_marks`.

    Raises:
        InvalidRequestError: the form cannot be enforced; `param` names its field.
    """
    use, form, content = request.tool_use, None, None
    if request.output_form is not None and not use.is_required:
        with naming_fields(**request.form_names):
            content = rule_of(request.output_form)
            form = checker.resolve(request.output_form)
    _check_inputs(request.described_tools, use.callable, checker)
    grammar = message_grammar(use, syntax, special_marks, content=content)
    if grammar is None and form is not None:
        # The form applies from the first token on, even if the prompt ends in open reasoning.
        return MessageForm(form, msgspec.structs.replace(syntax, is_reasoning_open=False))
    if grammar is None:
        return MessageForm(None, syntax)
    try:
        return MessageForm(checker.resolve(StructuredOutputs(grammar=grammar)), syntax)
    except InvalidRequestError as error:
        _check_tools(request.described_tools, use.callable, checker)
        raise InvalidRequestError(str(error), param="tools") from error


def _check_inputs(
    described: Sequence[tuple[str, Tool]], held: Sequence[Tool], checker: GrammarChecker
) -> None:
    """Raises InvalidRequestError: the grammar of a custom tool's input does not compile."""
    for place, tool in described:
        grammar = tool.function.input_grammar
        if tool in held and grammar is not None:
            with naming_fields(**{"structured_outputs.grammar": f"{place}.parameters"}):
                checker.resolve(StructuredOutputs(grammar=grammar))


def _check_tools(
    described: Sequence[tuple[str, Tool]], held: Sequence[Tool], checker: GrammarChecker
) -> None:
    """Raises InvalidRequestError: a single tool's schema cannot be enforced."""
    for place, tool in described:
        if tool not in held or tool.function.parameters is None:
            continue
        schema = enforced(tool.function.parameters, is_strict=tool.function.strict)
        with naming_fields(**{"structured_outputs.json": f"{place}.parameters"}):
            checker.resolve(StructuredOutputs(json=schema))
