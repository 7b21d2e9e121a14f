"""Reads a model's chat template once, and renders conversations with it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import msgspec

from legato.core.errors import InvalidRequestError
from legato.language.conversation.guard import (
    Conversation,
    MessageGuard,
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
from legato.language.conversation.thought_end import QWEN3_MESSAGE, ThoughtEnd
from legato.language.message.argument_types import typed_parameters
from legato.language.message.known_syntaxes import (
    HERMES,
    declared_syntax,
    reads_argument_text,
    reads_thinking,
    reads_tool_calls,
    reads_tools,
    syntax_of,
)
from legato.language.message.message_syntax import MessageSyntax, NamedCall, ToolParameters

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
        thinking_token_budget: most tokens of thinking in the answer; None or -1 for no limit.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_content_format: ContentFormat = "auto"
    chat_template_kwargs: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    message_special_tokens: MessageSpecialTokens = "text"
    thinking_token_budget: int | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """All variables of the template but the messages and the tools."""
        switch = {"enable_thinking": False} if self.thinking_token_budget == 0 else {}
        return {
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            **switch,
            **(self.chat_template_kwargs or {}),
        }


class ConversationKeywords(TypedDict, total=False):
    """The fields of `ConversationOptions`, as type checkers see keywords of `LLM.chat`."""

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    chat_template_content_format: ContentFormat
    chat_template_kwargs: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None
    message_special_tokens: MessageSpecialTokens
    thinking_token_budget: int | None


DEFAULT_OPTIONS = ConversationOptions()
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_PLAIN_FIELDS = frozenset({"role", "content", "name"})
_PROBE = "any-role"
_PROBED_THOUGHT = "any-thought"
_QWEN3 = ("<|im_start|>", "enable_thinking", '{"name": ')
"""In the templates of Qwen3, and not in those of Qwen3.5 and 3.6, whose calls are tags."""
_CALL_ID = "call_{id}"
_EFFORT_VARIABLES = ("reasoning_effort", "enable_thinking")
_MAX_TEMPLATES = 8
"""Templates kept; requests may bring their own."""
_WITH_SYSTEM = [{"role": "system", "content": "Hi"}, {"role": "user", "content": "Hi"}]


class RenderedText(NamedTuple):
    """A conversation as its chat template wrote it.

    Attributes:
        text: with stand-ins, for `Tokenizer.encode_rendered`.
        stand_ins: the characters that they replace.
    """

    text: str
    stand_ins: StandIns


class ChatTemplates:
    """The chat templates of one tokenizer, and others that requests bring; each is read once."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._read = lru_cache(maxsize=_MAX_TEMPLATES)(partial(ChatTemplate, tokenizer))

    def get(self, given: str | None = None, *, has_tools: bool = False) -> "ChatTemplate":
        """Return the template for a conversation; a checkpoint may have several.

        Args:
            given, has_tools: as of `Tokenizer.chat_template`.

        Raises:
            InvalidRequestError: the model has no template.
        """
        text = self._tokenizer.chat_template(given, has_tools=has_tools)
        return self._read(text, is_own=given is None)


class ChatTemplate:
    """A chat template, and what its text says of it.

    Args:
        text: in Jinja.
        is_own: whether it is the checkpoint's, which may declare the syntax of its messages.

    Attributes:
        syntax: of replies, whether or not a request asks to parse them.
        effort_variable: the variable that sets how much the model thinks; None without one.
    """

    def __init__(self, tokenizer: "Tokenizer", text: str, *, is_own: bool) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._reads_tools = reads_tools(text)
        self._reads_tool_calls = reads_tool_calls(text)
        self._reads_argument_text = reads_argument_text(text)
        self._reads_thinking = reads_thinking(text)
        self._reads_developer = "developer" in text
        self.effort_variable = next(filter(text.__contains__, _EFFORT_VARIABLES), None)
        self.syntax = self._syntax(is_own=is_own)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        *,
        options: Mapping[str, Any],
        special_tokens: MessageSpecialTokens = "text",
    ) -> RenderedText:
        """Render a conversation; content that is not read is moved to content that is.

        Args:
            tools: functions that the model may call, in OpenAI's form.
            options: further arguments of `Tokenizer.render_chat`.
            special_tokens: how to treat special tokens in all strings from the client: keep them as
                text, read them as tokens, or reject the request.

        Raises:
            InvalidRequestError: as `Tokenizer.render_chat`, or a special token must be rejected.
            MemoryError: as `Tokenizer.render_chat`.
        """
        for i, message in enumerate(messages):
            self._check_role(message.get("role"), f"messages.{i}.role")
        conversation, stand_ins = Conversation(messages, tools, options), StandIns()
        if special_tokens != "special":
            if special_tokens == "refuse":
                self._guard.check(conversation)
            conversation, stand_ins = self._guard.guarded(conversation)
        messages, tools, options = conversation
        if tools and self._reads_tools:
            options = {"tools": tools, "xml_tools": tools, **options}
        readable = self._readable(messages, tools)
        try:
            text = _rendered(lambda said: self._written(said, **options), readable)
        except InvalidRequestError as error:  # its message may quote the conversation
            told = str(error).translate({ord(key): value for key, value in stand_ins.items()})
            raise InvalidRequestError(told, param=error.param, code=error.code) from error.__cause__
        return RenderedText(unescaped(text, stand_ins), stand_ins)

    def reply_syntax(self, prompt: str, tools: Sequence[dict[str, Any]] = ()) -> MessageSyntax:
        """Return the syntax of the reply to a prompt that this template has rendered.

        Args:
            prompt: its text, or the end of it.
            tools: as of `render`.
        """
        calls, reasoning = self.syntax.tool_calls, self.syntax.reasoning
        has_types = calls is not None and calls.needs_types
        return msgspec.structs.replace(
            self.syntax,
            tools=tool_parameters(tools, has_types=has_types) if tools else {},
            is_reasoning_open=reasoning is not None and _ends_with(prompt, reasoning.begin),
        )

    def may_think(self, prompt: str) -> bool:
        """Whether the reply may hold reasoning: its prompt has not ended it already."""
        reasoning = self.syntax.reasoning
        if reasoning is None:
            return self.syntax.channels is not None
        return not _ends_with(prompt, reasoning.end)

    @cached_property
    def thought_end(self) -> ThoughtEnd:
        """How a thought ends that is cut: as the template writes the end of a past one."""
        reasoning = self.syntax.reasoning
        if reasoning is None:
            return ThoughtEnd()
        said = {"role": "assistant", "content": _PROBE}
        thought = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _PROBED_THOUGHT)
        try:
            text = self._written([*_WITH_SYSTEM[1:], {**said, **thought}])
        except InvalidRequestError:
            text = ""
        rest = text.partition(_PROBED_THOUGHT)[2].partition(reasoning.end)[2]
        after, found, _ = rest.partition(_PROBE)
        is_qwen3 = all(mark in self._text for mark in _QWEN3)
        message = QWEN3_MESSAGE if is_qwen3 and reasoning.end == "</think>" else ""
        return ThoughtEnd(message, after if found and not after.strip() else "")

    def _written(self, messages: list[Message], **options: Any) -> str:
        return self._tokenizer.render_chat(messages, chat_template=self._text, **options)

    def _syntax(self, *, is_own: bool) -> MessageSyntax:
        syntax = syntax_of(self._text, self._tokenizer.is_token)
        if is_own:
            syntax = declared_syntax(self._tokenizer.response_template, syntax)
        if not self._reads_tools and syntax.channels is None:
            return msgspec.structs.replace(syntax, tool_calls=HERMES)
        return syntax

    def _check_role(self, role: object, param: str) -> None:
        """Raise `InvalidRequestError` for a role that is neither OpenAI's nor the template's.

        A template takes a role that it names, or any if it writes roles as they come.
        """
        if role is None or role in _ROLES or self._names(role) or self._writes_any_role:
            return
        raise InvalidRequestError(
            f"this model's chat template does not take the role {role!r}", param=param
        )

    def _names(self, role: object) -> bool:
        return any(quoted in self._text for quoted in (f"'{role}'", f'"{role}"'))

    @cached_property
    def _guard(self) -> MessageGuard:
        return self._tokenizer.message_guard(self._text, self.syntax)

    @cached_property
    def _writes_any_role(self) -> bool:
        try:
            return _PROBE in self._written([{"role": _PROBE, "content": "Hi"}])
        except InvalidRequestError:
            return False

    def _readable(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[Message]:
        """Rewrite the messages for a template that cannot read all of their fields."""
        written = list(messages)
        if not tools and all(map(_is_plain, written)):
            return written
        if not self._reads_developer:
            written = with_role(written, "developer", "system")
        if not self._reads_tools:
            written = with_tools_in_system_message(written, tools)
        if not self._reads_tool_calls:
            return with_calls_in_content(written)
        if self._reads_argument_text:
            written = with_argument_text(written)
        if self._reads_thinking:
            written = with_thinking(written)
        calls = self.syntax.tool_calls
        named = isinstance(calls.call, NamedCall) and calls.call.id_pattern if calls else None
        written = with_call_ids(written, named or _CALL_ID)
        return with_ids_of(written, calls.id_chars) if calls and calls.id_chars else written


def tool_parameters(
    tools: Sequence[dict[str, Any]], *, has_types: bool
) -> dict[str, ToolParameters]:
    """Return the parameters of each tool by its name.

    Args:
        tools: in OpenAI's form.
        has_types: whether the types are needed too.
    """
    found: dict[str, ToolParameters] = {}
    for tool in tools:
        function = tool.get("function", tool)
        schema = function.get("parameters")
        is_typed = has_types and isinstance(schema, dict)
        found[str(function.get("name"))] = (
            typed_parameters(schema) if is_typed else ToolParameters()
        )
    return found


def _ends_with(prompt: str, mark: str) -> bool:
    return prompt.rstrip().endswith(mark.rstrip())


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


def _is_plain(message: Message) -> bool:
    """Whether every template reads a message: content alone, of a role that each may have."""
    return message.keys() <= _PLAIN_FIELDS and message.get("role") not in ("developer", "tool")


def _is_system(message: Message) -> bool:
    return message.get("role") == "system"


def _takes_system(render: Callable[[list[Message]], str]) -> bool:
    """Whether the template takes a system message in the first place."""
    try:
        render(_WITH_SYSTEM)
    except InvalidRequestError:
        return False
    return True
