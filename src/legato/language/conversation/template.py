"""Renders conversations with a model's chat template, and finds the syntax of the reply."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from legato.core.errors import InvalidRequestError
from legato.language.conversation.guard import (
    Conversation,
    MessageSpecialTokens,
    StandIns,
    unescaped,
)
from legato.language.conversation.rewrite import (
    Message,
    with_argument_objects,
    with_argument_text,
    with_call_ids,
    with_calls_in_content,
    with_ids_of,
    with_role,
    with_system_in_user_messages,
    with_thinking,
    with_tools_in_system_message,
)
from legato.language.message.argument_types import tool_parameters
from legato.language.message.known_syntaxes import (
    HERMES,
    declared_syntax,
    reads_argument_text,
    reads_thinking,
    reads_tool_calls,
    reads_tools,
    syntax_of,
)
from legato.language.message.message_syntax import MessageSyntax, NamedCall

if TYPE_CHECKING:  # the import takes two thirds of a second
    from legato.language.tokenizer.tokenizer import Tokenizer


ContentFormat = Literal["auto", "string", "openai"]


class ConversationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a conversation becomes a prompt: keywords of `LLM.chat`, fields of a chat over HTTP.

    Attributes:
        add_generation_prompt: end the prompt with the beginning of an answer.
        continue_final_message: continue the last message instead of answering it.
        chat_template: a Jinja template instead of the model's own.
        chat_template_content_format: whether the template gets a content's parts as they are
            ("openai") or as one text, on lines of their own.
        chat_template_kwargs: further variables of the template.
        tools: functions that the model may call, as JSON schemas in OpenAI's form.
        message_special_tokens: how to treat special tokens in messages and tools: as "text", as
            "special" tokens, or "refuse" them.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_content_format: ContentFormat = "auto"
    chat_template_kwargs: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    message_special_tokens: MessageSpecialTokens = "text"

    @property
    def variables(self) -> dict[str, Any]:
        """All variables of the template but the messages and the tools."""
        return {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            **(self.chat_template_kwargs or {}),
        }


DEFAULT_OPTIONS = ConversationOptions()
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_PROBE = "any-role"
_CALL_ID = "call_{id}"
_WITH_SYSTEM = [{"role": "system", "content": "Hi"}, {"role": "user", "content": "Hi"}]


class RenderedChat(NamedTuple):
    """A conversation that its chat template has rendered.

    Attributes:
        text: the rendered text with stand-ins, for `Tokenizer.encode_rendered`.
        syntax: of the model's reply, whether or not the request asks to parse it.
    """

    text: str
    stand_ins: StandIns
    syntax: MessageSyntax

    @property
    def may_think(self) -> bool:
        """Whether the reply may hold reasoning: the prompt has not ended it already."""
        reasoning = self.syntax.reasoning
        if reasoning is None:
            return self.syntax.channels is not None
        return not self.text.rstrip().endswith(reasoning.end.rstrip())


def rendered_chat(
    tokenizer: "Tokenizer",
    messages: Sequence[Message],
    asked: ConversationOptions = DEFAULT_OPTIONS,
) -> RenderedChat:
    """Render a conversation; content that its template does not read is moved to content it reads.

    Args:
        messages: their contents are in the form that the template gets.

    Raises:
        InvalidRequestError: as `Tokenizer.render_chat`, or a special token must be rejected.
        MemoryError: as `Tokenizer.render_chat`.
    """
    chat_template, options = asked.chat_template, asked.variables
    tools: Sequence[dict[str, Any]] = [dict(tool) for tool in asked.tools or ()]
    template = tokenizer.chat_template(chat_template, has_tools=bool(tools))
    syntax = _syntax(tokenizer, template, is_own=chat_template is None)
    _check_roles(tokenizer, template, messages, chat_template)
    shown = tools
    conversation, stand_ins = Conversation(messages, tools, options), StandIns()
    if asked.message_special_tokens != "special":
        guard = tokenizer.message_guard(template, syntax)
        if asked.message_special_tokens == "refuse":
            guard.check(conversation)
        conversation, stand_ins = guard.guarded(conversation)
    messages, tools, variables = conversation
    if tools and reads_tools(template):
        variables = {"tools": tools, "xml_tools": tools, **variables}
    readable = _readable(messages, tools, template, syntax)
    try:
        text = _rendered(
            lambda said: tokenizer.render_chat(said, chat_template=chat_template, **variables),
            readable,
        )
    except InvalidRequestError as error:  # its message may quote the conversation
        told = str(error).translate({ord(key): value for key, value in stand_ins.items()})
        raise InvalidRequestError(told, param=error.param, code=error.code) from error.__cause__
    text = unescaped(text, stand_ins)
    return RenderedChat(text, stand_ins, _opened(_offering(syntax, shown), text))


def _rendered(render: Callable[[list[Message]], str], messages: list[Message]) -> str:
    """Render a conversation; what its template refuses is put into other words, if that helps.

    Most templates write arguments that are no object as they are, and some take objects only. Some
    take no system message, or only a first one: another's text begins the next user message.
    """
    try:
        return render(messages)
    except InvalidRequestError:
        for written in _put_otherwise(render, messages):
            with suppress(InvalidRequestError):
                return render(written)
        raise


def _put_otherwise(
    render: Callable[[list[Message]], str], messages: list[Message]
) -> Iterator[list[Message]]:
    """Yield other forms of a conversation, the nearest first."""
    written = with_argument_objects(messages)
    if written != messages:
        yield written
    if not any(_is_system(message) for message in messages):
        return
    num_taken = 1 if _is_system(messages[0]) and _takes_system(render) else 0
    if any(_is_system(message) for message in messages[num_taken:]):
        for said in (messages, written) if written != messages else (messages,):
            yield [*said[:num_taken], *with_system_in_user_messages(said[num_taken:])]


def _is_system(message: Message) -> bool:
    return message.get("role") == "system"


def _takes_system(render: Callable[[list[Message]], str]) -> bool:
    """Whether the template takes a system message in the first place."""
    try:
        render(_WITH_SYSTEM)
    except InvalidRequestError:
        return False
    return True


def _check_roles(
    tokenizer: "Tokenizer",
    template: str,
    messages: Sequence[Message],
    chat_template: str | None,
) -> None:
    """Raise `InvalidRequestError` for a role that is not OpenAI's, unless the template takes it.

    A template takes a role that it names, or any if it writes roles as they come.
    """
    for i, message in enumerate(messages):
        role = message.get("role")
        if (
            role is None
            or role in _ROLES
            or any(quoted in template for quoted in (f"'{role}'", f'"{role}"'))
        ):
            continue
        probe = {"role": _PROBE, "content": "Hi"}
        try:
            told = tokenizer.render_chat([probe], chat_template=chat_template)
        except InvalidRequestError:
            told = ""
        if _PROBE not in told:
            raise InvalidRequestError(
                f"this model's chat template does not take the role {role!r}",
                param=f"messages.{i}.role",
            )
        return  # it writes any role


def reply_syntax(
    tokenizer: "Tokenizer", tools: Sequence[dict[str, Any]], prompt: str
) -> MessageSyntax:
    """Return the syntax of the reply to a prompt that the model's own template has rendered.

    Args:
        tools: functions that the model may call, in OpenAI's form.
        prompt: its text, or the end of it.
    """
    if tokenizer.template_problem is not None:
        return MessageSyntax()
    template = tokenizer.chat_template(has_tools=bool(tools))
    return _opened(_offering(_syntax(tokenizer, template, is_own=True), tools), prompt)


def _syntax(tokenizer: "Tokenizer", template: str, *, is_own: bool) -> MessageSyntax:
    """Return the syntax of replies. Args: is_own: whether the template is the checkpoint's."""
    syntax = syntax_of(template, tokenizer.is_token)
    if is_own:
        syntax = declared_syntax(tokenizer.response_template, syntax)
    if not reads_tools(template) and syntax.channels is None:
        return msgspec.structs.replace(syntax, tool_calls=HERMES)
    return syntax


def _readable(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]],
    template: str,
    syntax: MessageSyntax,
) -> list[Message]:
    """Rewrite the messages for a template that cannot read all of their fields."""
    written = list(messages)
    if "developer" not in template:
        written = with_role(written, "developer", "system")
    if not reads_tools(template):
        written = with_tools_in_system_message(written, tools)
    if not reads_tool_calls(template):
        return with_calls_in_content(written)
    if reads_argument_text(template):
        written = with_argument_text(written)
    if reads_thinking(template):
        written = with_thinking(written)
    calls = syntax.tool_calls
    named = isinstance(calls.call, NamedCall) and calls.call.id_pattern if calls else None
    written = with_call_ids(written, named or _CALL_ID)
    return with_ids_of(written, calls.id_chars) if calls and calls.id_chars else written


def _offering(syntax: MessageSyntax, tools: Sequence[dict[str, Any]]) -> MessageSyntax:
    """Return the syntax of a reply that may call these tools."""
    has_types = syntax.tool_calls is not None and syntax.tool_calls.needs_types
    offered = tool_parameters(tools, has_types=has_types)
    return msgspec.structs.replace(syntax, tools=offered)


def _opened(syntax: MessageSyntax, prompt: str) -> MessageSyntax:
    """Return the syntax of the reply, which may begin inside reasoning that the prompt opened."""
    reasoning = syntax.reasoning
    is_open = reasoning is not None and prompt.rstrip().endswith(reasoning.begin.rstrip())
    return msgspec.structs.replace(syntax, is_reasoning_open=is_open)
