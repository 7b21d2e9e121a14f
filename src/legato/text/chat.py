"""Conversations as a model's chat template writes them, and how the model will go on from there."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from legato.core.errors import InvalidRequestError
from legato.text.conversation import (
    Message,
    with_calls_in_content,
    with_ids_of,
    with_role,
    with_tools_in_system_message,
)
from legato.text.message_guard import (
    Conversation,
    MessageSpecialTokens,
    StandIns,
    unescaped,
)
from legato.text.message_syntax import (
    HERMES,
    MessageSyntax,
    reads_tool_calls,
    reads_tools,
    syntax_of,
)
from legato.text.response_template import declared_syntax

if TYPE_CHECKING:  # it takes two thirds of a second to import
    from legato.text.tokenizer import Tokenizer


class RenderedChat(NamedTuple):
    """A conversation as its template wrote it.

    Attributes:
        text: with stand-ins, for `Tokenizer.encode_rendered`.
        syntax: what the model writes, whether or not it is asked to.
    """

    text: str
    stand_ins: StandIns
    syntax: MessageSyntax


def rendered_chat(
    tokenizer: "Tokenizer",
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] = (),
    *,
    chat_template: str | None = None,
    options: Mapping[str, Any],
    special_tokens: MessageSpecialTokens = "text",
) -> RenderedChat:
    """Write a conversation; what its template does not read is put into what it does.

    Args:
        tools: that the model is told of, in OpenAI's form.
        chat_template: a template in place of the model's own.
        options: further ones of `Tokenizer.render_chat`.
        special_tokens: what becomes of those in all that a client sent: they stay text, or are the
            tokens, or are refused.

    Raises:
        InvalidRequestError: as `Tokenizer.render_chat`, or there is a special token to refuse.
        MemoryError: as `Tokenizer.render_chat`.
    """
    template = tokenizer.chat_template(chat_template, has_tools=bool(tools))
    syntax = syntax_of(template)
    if chat_template is None:
        syntax = declared_syntax(tokenizer.response_template, syntax)
    if not reads_tools(template):
        syntax = msgspec.structs.replace(syntax, tool_calls=HERMES)
    conversation, stand_ins = Conversation(messages, tools, options), StandIns()
    if special_tokens != "special":
        guard = tokenizer.message_guard(template, syntax)
        if special_tokens == "refuse":
            guard.check(conversation)
        conversation, stand_ins = guard.guarded(conversation)
    messages, tools, options = conversation
    if tools and reads_tools(template):
        options = {"tools": tools, "xml_tools": tools, **options}
    readable = _readable(messages, tools, template, syntax)
    try:
        text = tokenizer.render_chat(readable, chat_template=chat_template, **options)
    except InvalidRequestError as error:  # which may quote the messages
        told = str(error).translate({ord(key): value for key, value in stand_ins.items()})
        raise InvalidRequestError(told, param=error.param, code=error.code) from error.__cause__
    text = unescaped(text, stand_ins)
    return RenderedChat(text, stand_ins, _opened(syntax, text))


def _readable(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    template: str,
    syntax: MessageSyntax,
) -> list[Message]:
    """As this template can read them."""
    written = list(messages)
    if "developer" not in template:
        written = with_role(written, "developer", "system")
    if not reads_tools(template):
        written = with_tools_in_system_message(written, tools)
    if not reads_tool_calls(template):
        return with_calls_in_content(written)
    id_chars = syntax.tool_calls and syntax.tool_calls.id_chars
    return with_ids_of(written, id_chars) if id_chars else written


def _opened(syntax: MessageSyntax, prompt: str) -> MessageSyntax:
    """The syntax of what goes on from the prompt."""
    reasoning = syntax.reasoning
    is_open = reasoning is not None and prompt.rstrip().endswith(reasoning.begin)
    return msgspec.structs.replace(syntax, is_reasoning_open=is_open)
