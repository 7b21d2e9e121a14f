"""Makes a conversation's prompt, and finds the syntax of the model's answer."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from legato.api.bodies.chat_messages import ChatMessage, TemplateOptions
from legato.api.bodies.chat_tools import Tool
from legato.api.openai.generate_body import GenerateRequest, ParseContext
from legato.core.errors import InvalidRequestError
from legato.language.conversation.guard import MessageSpecialTokens
from legato.language.conversation.template import ConversationOptions, rendered_chat, reply_syntax
from legato.language.message.message_syntax import MessageSyntax
from legato.language.tokenizer.tokenizer import Tokenizer

_NO_REASONING = "none"
_SENT = set(ConversationOptions.__struct_fields__) - {
    *("tools", "chat_template_kwargs"),  # others are added to them
    *("chat_template_content_format", "message_special_tokens"),  # the server decides
}
"""Options that are as the client sends them."""
_LAST_TOKENS = 32
"""Tokens at the end of a prompt among which the mark of open reasoning is sought."""


class ChatPrompt(msgspec.Struct, frozen=True):
    """Attributes:
    syntax, may_think: as of `RenderedChat`.
    reads_effort: whether the chat template reads the effort, if there is one.
    offsets: as of `Tokenizer.offsets`; None if not asked for.
    """

    token_ids: list[int]
    syntax: MessageSyntax
    may_think: bool
    reads_effort: bool
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
        tokenizer: Tokenizer,
        *,
        trusts_templates: bool,
        special_tokens: MessageSpecialTokens,
        check_fits: Callable[[int, str], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._trusts_templates = trusts_templates
        self._special_tokens = special_tokens
        self._check_fits = check_fits

    def make(
        self,
        messages: Sequence[ChatMessage],
        options: TemplateOptions,
        tools: Sequence[Tool] = (),
        effort: str | None = None,
        *,
        is_cut: bool = False,
        has_offsets: bool = False,
    ) -> ChatPrompt:
        """Render and tokenize a conversation.

        Args:
            tools: shown to the model; those in `options` are ignored.
            effort: `reasoning_effort`; ignored if the template reads no such thing.
            is_cut: whether it may be longer than the context.
            has_offsets: whether to find the places of the tokens in the text.

        Raises:
            InvalidRequestError: the template refuses it, or it is too long.
        """
        if options.chat_template is not None and not self._trusts_templates:
            raise InvalidRequestError(
                "this server runs no templates from requests (--trust-request-chat-template)",
                param="chat_template",
            )
        check_fits = (lambda *_: None) if is_cut else self._check_fits
        check_fits(sum(message.num_chars for message in messages), "messages")
        template = self._tokenizer.chat_template(options.chat_template, has_tools=bool(tools))
        reasoning = _reasoning_variables(template, effort)
        rendered = rendered_chat(
            self._tokenizer,
            [message.for_template() for message in messages],
            ConversationOptions(
                tools=[tool.for_template() for tool in tools],
                chat_template_kwargs={**reasoning, **options.template_variables},
                message_special_tokens=self._special_tokens,
                **{name: getattr(options, name) for name in _SENT},
            ),
        )
        check_fits(len(rendered.text), "messages")
        text, stand_ins = rendered.text, rendered.stand_ins
        token_ids = self._tokenizer.encode_rendered(text, stand_ins)
        offsets = None
        if has_offsets:
            offsets = self._tokenizer.offsets(text, add_special_tokens=False, stand_ins=stand_ins)
        return ChatPrompt(
            token_ids,
            rendered.syntax,
            may_think=rendered.may_think,
            reads_effort=effort is None or bool(reasoning),
            offsets=offsets,
        )

    def reply_syntax(self, request: GenerateRequest) -> MessageSyntax:
        """Return the syntax of the message that answers a rendered prompt."""
        context = request.parse_context or ParseContext()
        tools = [tool.for_template() for tool in context.tools or ()]
        last = request.token_ids[-_LAST_TOKENS:]
        end = self._tokenizer.decode(last, skip_special_tokens=False)
        syntax = reply_syntax(self._tokenizer, tools, end)
        if request.reasoning_ended:
            syntax = msgspec.structs.replace(syntax, is_reasoning_open=False)
        return syntax if tools else syntax.without_calls()


def _reasoning_variables(template: str, effort: str | None) -> dict[str, Any]:
    if effort is None:
        return {}
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if "enable_thinking" in template:
        return {"enable_thinking": effort != _NO_REASONING}
    return {}
