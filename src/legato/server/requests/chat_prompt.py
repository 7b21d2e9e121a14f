"""From a conversation to its prompt, and to how the model will write what follows."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from legato.core.errors import InvalidRequestError
from legato.model.message_syntax import (
    HERMES,
    MessageSyntax,
    reads_tool_calls,
    reads_tools,
    syntax_of,
)
from legato.model.response_template import declared_syntax
from legato.model.tokenizer import Tokenizer
from legato.server.requests.conversation import (
    Message,
    with_calls_in_content,
    with_ids_of,
    with_role,
    with_tools_in_system_message,
)
from legato.server.requests.messages import ChatMessage, TemplateOptions
from legato.server.requests.tools import Tool

_NO_REASONING = "none"


class ChatPrompt(msgspec.Struct, frozen=True):
    """Attributes: `syntax` has what the model writes, whether or not it is asked to."""

    token_ids: list[int]
    syntax: MessageSyntax


class ChatPrompts:
    """Makes prompts of conversations.

    Args:
        trusts_templates: whether templates in requests are run.
        check_fits: is given a number of characters and the field that they come from; raises what
            refuses too many.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        trusts_templates: bool,
        check_fits: Callable[[int, str], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._trusts_templates = trusts_templates
        self._check_fits = check_fits

    def make(
        self,
        messages: Sequence[ChatMessage],
        options: TemplateOptions,
        tools: Sequence[Tool] = (),
        effort: str | None = None,
        *,
        is_cut: bool = False,
    ) -> ChatPrompt:
        """Render and tokenize a conversation.

        Args:
            tools: that the model is told of; those in `options` are not looked at.
            effort: `reasoning_effort`.
            is_cut: whether it may be longer than the context.

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
        syntax = syntax_of(template)
        if options.chat_template is None:
            syntax = declared_syntax(self._tokenizer.response_template, syntax)
        signatures = [tool.for_template() for tool in tools]
        variables = _reasoning_variables(template, effort)
        if not reads_tools(template):
            syntax = msgspec.structs.replace(syntax, tool_calls=HERMES)
        elif tools:
            variables |= {"tools": signatures, "xml_tools": signatures}
        text = self._tokenizer.render_chat(
            _messages(messages, signatures, template, syntax),
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            chat_template=options.chat_template,
            **(variables | (options.chat_template_kwargs or {})),
        )
        check_fits(len(text), "messages")
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        return ChatPrompt(token_ids, _opened(syntax, text))


def _messages(
    messages: Sequence[ChatMessage],
    signatures: list[dict[str, Any]],
    template: str,
    syntax: MessageSyntax,
) -> list[Message]:
    """As this template can read them."""
    written = [message.for_template() for message in messages]
    if "developer" not in template:
        written = with_role(written, "developer", "system")
    if not reads_tools(template):
        written = with_tools_in_system_message(written, signatures)
    if not reads_tool_calls(template):
        return with_calls_in_content(written)
    id_chars = syntax.tool_calls and syntax.tool_calls.id_chars
    return with_ids_of(written, id_chars) if id_chars else written


def _reasoning_variables(template: str, effort: str | None) -> dict[str, Any]:
    if effort is None:
        return {}
    if "reasoning_effort" in template:
        return {"reasoning_effort": effort}
    if "enable_thinking" in template:
        return {"enable_thinking": effort != _NO_REASONING}
    if effort == _NO_REASONING:
        return {}
    raise InvalidRequestError(
        "this model's chat template knows no efforts of reasoning",
        param="reasoning_effort",
        code="unsupported_parameter",
    )


def _opened(syntax: MessageSyntax, prompt: str) -> MessageSyntax:
    """The syntax of what goes on from the prompt."""
    reasoning = syntax.reasoning
    is_open = reasoning is not None and prompt.rstrip().endswith(reasoning.begin)
    return msgspec.structs.replace(syntax, is_reasoning_open=is_open)
