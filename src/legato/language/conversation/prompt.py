"""Makes a conversation's prompt, and finds the syntax of the model's answer."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from legato.core.errors import InvalidRequestError
from legato.language.conversation.guard import MessageSpecialTokens
from legato.language.conversation.rewrite import Message
from legato.language.conversation.template import (
    ChatTemplate,
    ChatTemplates,
    ConversationOptions,
    RenderedText,
)
from legato.language.conversation.thought_end import ThoughtEnd
from legato.language.message.message_syntax import MessageSyntax
from legato.language.message.tools import ToolFunction

if TYPE_CHECKING:  # the import takes two thirds of a second, and bodies have options of prompts
    from legato.language.tokenizer.tokenizer import Tokenizer

_NO_REASONING = "none"
_LAST_TOKENS = 32
"""Tokens at the end of a prompt among which the mark of open reasoning is sought."""


class RenderedChat(msgspec.Struct, frozen=True):
    """The prompt of a conversation.

    Attributes:
        syntax: of the reply, whether or not the request asks to parse it.
        may_think, thought_end: as of `ChatTemplate`.
        reads_effort: whether the template reads the effort, if there is one.
        offsets: as of `Tokenizer.offsets`; None if not asked for.
    """

    token_ids: list[int]
    syntax: MessageSyntax
    may_think: bool
    reads_effort: bool
    thought_end: ThoughtEnd = ThoughtEnd()
    offsets: list[tuple[int, int]] | None = None


class ChatPrompts:
    """Makes prompts of conversations.

    Args:
        trusts_templates: whether templates in requests are run.
        special_tokens: how to treat special tokens in the text of messages.
        check_fits: called with a number of characters and the field that they come from; raises
            if they are too many.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        *,
        trusts_templates: bool,
        special_tokens: MessageSpecialTokens,
        check_fits: Callable[[int, str], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._templates = ChatTemplates(tokenizer)
        self._trusts_templates = trusts_templates
        self._special_tokens = special_tokens
        self._check_fits = check_fits

    def make(
        self,
        messages: Sequence[Message],
        options: ConversationOptions,
        tools: Sequence[ToolFunction] = (),
        *,
        effort: str | None = None,
        is_cut: bool = False,
        has_offsets: bool = False,
    ) -> RenderedChat:
        """Render and tokenize a conversation.

        Args:
            messages: in the form of transformers' chat templates, with content as text.
            options: but for their tools and special tokens.
            tools: shown to the model.
            effort: how much to think, as `reasoning_effort` of OpenAI's API; None leaves it open. A
                template that reads no such thing ignores it.
            is_cut: whether it may be longer than the context.
            has_offsets: whether to find the places of the tokens in the text.

        Raises:
            InvalidRequestError: the template refuses it, or it is too long.
        """
        template, variable = self._template(options, tools, effort)
        shown = tools_for_template(tools)
        text, stand_ins = self._rendered(template, messages, shown, options, variable, is_cut)
        token_ids = self._tokenizer.encode_rendered(text, stand_ins)
        offsets = None
        if has_offsets:
            offsets = self._tokenizer.offsets(text, add_special_tokens=False, stand_ins=stand_ins)
        return RenderedChat(
            token_ids,
            template.reply_syntax(text, shown),
            may_think=template.may_think(text),
            reads_effort=effort is None or bool(variable),
            thought_end=template.thought_end if template.may_think(text) else ThoughtEnd(),
            offsets=offsets,
        )

    def written(
        self,
        messages: Sequence[Message],
        options: ConversationOptions,
        tools: Sequence[ToolFunction] = (),
        *,
        effort: str | None = None,
    ) -> str:
        """Return the text of a conversation's prompt. Args and errors: as of `make`."""
        template, variable = self._template(options, tools, effort)
        shown = tools_for_template(tools)
        text, stand_ins = self._rendered(template, messages, shown, options, variable)
        return text.translate({ord(key): value for key, value in stand_ins.items()})

    def template_text(self) -> str:
        """Return the model's own template for conversations without tools; empty without one."""
        if self._tokenizer.template_problem is not None:
            return ""
        return self._tokenizer.chat_template()

    def abilities(self) -> list[str]:
        """Return Ollama's words for what replies may hold: "tools" and "thinking"."""
        if self._tokenizer.template_problem is not None:
            return []
        syntax = self._templates.get().syntax
        may_think = syntax.reasoning is not None or syntax.channels is not None
        return ["tools", "thinking"] if may_think else ["tools"]

    def reply_syntax(
        self,
        prompt_token_ids: Sequence[int],
        tools: Sequence[ToolFunction] = (),
        *,
        has_reasoned: bool = False,
    ) -> MessageSyntax:
        """Return the syntax of the message that answers a prompt that was rendered before.

        Args:
            tools: that the model was shown.
            has_reasoned: whether the prompt's reasoning has ended.
        """
        if self._tokenizer.template_problem is not None:
            return MessageSyntax()
        last = list(prompt_token_ids[-_LAST_TOKENS:])
        end = self._tokenizer.decode(last, skip_special_tokens=False)
        template = self._templates.get(has_tools=bool(tools))
        syntax = template.reply_syntax(end, tools_for_template(tools))
        if has_reasoned:
            syntax = msgspec.structs.replace(syntax, is_reasoning_open=False)
        return syntax if tools else syntax.without_calls()

    def _template(
        self, options: ConversationOptions, tools: Sequence[ToolFunction], effort: str | None
    ) -> tuple[ChatTemplate, dict[str, Any]]:
        """Return the template, and its variable for the effort, if it reads it."""
        if options.chat_template is not None and not self._trusts_templates:
            raise InvalidRequestError(
                "this server runs no templates from requests (--trust-request-chat-template)",
                param="chat_template",
            )
        template = self._templates.get(options.chat_template, has_tools=bool(tools))
        return template, _effort(template, effort)

    def _rendered(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        shown: Sequence[dict[str, Any]],
        options: ConversationOptions,
        variable: dict[str, Any],
        is_cut: bool = False,
    ) -> RenderedText:
        check_fits = (lambda *_: None) if is_cut else self._check_fits
        check_fits(sum(map(_num_chars, messages)), "messages")
        rendered = template.render(
            messages,
            shown,
            options={**variable, **options.variables},
            special_tokens=self._special_tokens,
        )
        check_fits(len(rendered.text), "messages")
        return rendered


def tools_for_template(tools: Sequence[ToolFunction]) -> list[dict[str, Any]]:
    """Return tools in the format of transformers' chat templates."""
    functions = list(map(described, tools))
    for function in functions:
        function.setdefault("description", "")
        function.setdefault("parameters", {"type": "object", "properties": {}})
    return [{"type": "function", "function": function} for function in functions]


def described(tool: ToolFunction) -> dict[str, Any]:
    """Return a function in OpenAI's form, without fields that are None."""
    given = {name: getattr(tool, name) for name in ("name", "description", "parameters")}
    return {name: value for name, value in given.items() if value is not None}


def _num_chars(message: Message) -> int:
    return len(message["content"]) + len(message.get("reasoning_content", ""))


def _effort(template: ChatTemplate, effort: str | None) -> dict[str, Any]:
    """Return the variable that sets an effort, if there is one and the template reads it."""
    match template.effort_variable:
        case "reasoning_effort" as name if effort is not None:
            return {name: effort}
        case "enable_thinking" as name if effort is not None:
            return {name: effort != _NO_REASONING}
    return {}
