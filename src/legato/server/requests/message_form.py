"""What a chat's answer is held to: by its tools, by the form of its content, or by both."""

from collections.abc import Callable, Sequence

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
    """What holds an answer, and how it is to be read.

    Attributes:
        outputs: a grammar that compiles; None leaves the answer free.
        syntax: of what is then written.
    """

    outputs: StructuredOutputs | None
    syntax: MessageSyntax


def message_form(
    request: ChatRequest,
    syntax: MessageSyntax,
    checker: GrammarChecker,
    special_token_id: Callable[[str], int | None],
) -> MessageForm:
    """The form that a request asks for, in the syntax in which its model writes.

    Args:
        syntax: where it has tool calls, the model is told of tools.

    Raises:
        InvalidRequestError: it cannot be met; `param` names the field that asks for it.
    """
    use, form, content = request.tool_use, None, None
    if request.output_form is not None and not use.is_required:
        with naming_fields(**request.form_names):
            content = rule_of(request.output_form)
            form = checker.resolve(request.output_form)
    grammar = message_grammar(use, syntax, special_token_id, content=content)
    if grammar is None and form is not None:
        # It holds from the first token on, in whatever the prompt has ended.
        return MessageForm(form, msgspec.structs.replace(syntax, is_reasoning_open=False))
    if grammar is None:
        return MessageForm(None, syntax)
    try:
        return MessageForm(checker.resolve(StructuredOutputs(grammar=grammar)), syntax)
    except InvalidRequestError as error:
        _check_tools(request.described_tools, use.callable, checker)
        raise InvalidRequestError(str(error), param="tools") from error


def _check_tools(
    described: Sequence[tuple[str, Tool]], held: Sequence[Tool], checker: GrammarChecker
) -> None:
    """Raises InvalidRequestError: a schema cannot be held to, by itself."""
    for place, tool in described:
        if tool not in held or tool.function.parameters is None:
            continue
        schema = enforced(tool.function.parameters, is_strict=tool.function.strict)
        with naming_fields(**{"structured_outputs.json": f"{place}.parameters"}):
            checker.resolve(StructuredOutputs(json=schema))
