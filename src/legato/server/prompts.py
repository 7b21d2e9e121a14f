"""From what a client sent to the token ids of a prompt."""

import asyncio
from collections.abc import Callable

from legato.core.errors import InvalidRequestError
from legato.server.chat_request import ChatMessage, TemplateOptions
from legato.server.completion_request import Prompt
from legato.server.context import Context

# Shorter texts take less time to tokenize than a thread takes to start on them.
_LONG_TEXT = 4096


async def prompt_token_ids(
    context: Context, prompt: Prompt, *, add_special_tokens: bool
) -> list[int]:
    """Tokenize a prompt that is not tokenized yet."""
    if not isinstance(prompt, str):
        return prompt
    text = prompt
    return await _off_loop(
        len(text), lambda: context.client.tokenizer.encode(text, add_special_tokens)
    )


async def chat_token_ids(
    context: Context, messages: list[ChatMessage], options: TemplateOptions
) -> list[int]:
    """Render a conversation with the chat template.

    Raises:
        InvalidRequestError: the template is missing, not trusted, or refuses the messages.
    """
    if options.chat_template is not None and not context.config.trust_request_chat_template:
        raise InvalidRequestError(
            "this server runs no templates from requests (--trust-request-chat-template)",
            param="chat_template",
        )
    rendered = [message.model_dump(exclude_unset=True) for message in messages]
    return await _off_loop(
        sum(len(message.content) for message in messages),
        lambda: context.client.tokenizer.apply_chat_template(
            rendered,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            chat_template=options.chat_template,
            **(options.chat_template_kwargs or {}),
        ),
    )


async def _off_loop(num_chars: int, tokenize: Callable[[], list[int]]) -> list[int]:
    """Tokenize on a thread, unless it is quick, so that no stream waits for it."""
    if num_chars < _LONG_TEXT:
        return tokenize()
    return await asyncio.to_thread(tokenize)
