"""From what a client sent to the token ids of a prompt."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, WithJsonSchema, model_validator

from legato.core.errors import InvalidRequestError
from legato.server.context import Context
from legato.server.http.bodies import RequestModel

# Shorter texts take less time to tokenize than a thread takes to start on them.
_LONG_TEXT = 4096

# Arguments of the template renderer that are not for the template.
_RESERVED = ("self", "messages", "chat_template", "add_generation_prompt", "continue_final_message")

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}

_Result = TypeVar("_Result")

Prompt = str | list[int]


def _joined_text(value: Any) -> Any:
    """One text from a message's parts, which stand on lines of their own."""
    if not isinstance(value, list):
        return value
    return "\n".join(map(_part_text, value))


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ValueError(
            f"a content part of type {kind!r} is not supported; parts are "
            '{"type": "text", "text": "..."}'
        )
    text: str = part["text"]
    return text


MessageText = Annotated[
    str,
    BeforeValidator(_joined_text),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]}),
]


class ChatMessage(RequestModel):
    """One message; what is set goes to the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: MessageText
    name: str | None = None
    tool_call_id: str | None = None


class TemplateOptions(RequestModel):
    """How messages become a prompt."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_template_options(self) -> "TemplateOptions":
        for name in _RESERVED:
            if name in (self.chat_template_kwargs or {}):
                raise InvalidRequestError(
                    f"chat_template_kwargs must not contain {name}", param="chat_template_kwargs"
                )
        return self


async def prompt_token_ids(
    context: Context, prompts: Sequence[Prompt], *, add_special_tokens: bool
) -> list[list[int]]:
    """Tokenize those prompts that are not tokenized yet."""
    encode = context.client.tokenizer.encode

    def tokenize() -> list[list[int]]:
        return [
            encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    return await off_loop(num_chars, tokenize)


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
    num_chars = sum(len(message.content) for message in messages)
    # A client's own template can take any time, whatever it is applied to.
    return await off_loop(
        num_chars if options.chat_template is None else _LONG_TEXT,
        lambda: context.client.tokenizer.apply_chat_template(
            rendered,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            chat_template=options.chat_template,
            **(options.chat_template_kwargs or {}),
        ),
    )


def check_text_fits(context: Context, num_chars: int) -> None:
    """Refuse a text that is too long however it is tokenized, before the time is spent on that.

    Raises:
        InvalidRequestError: the model's context cannot hold `num_chars` characters.
    """
    max_model_len = context.client.info.max_model_len
    max_chars = max_model_len * context.client.tokenizer.max_token_chars
    if num_chars > max_chars:
        raise InvalidRequestError(
            f"this model's maximum context length is {max_model_len} tokens, which are at most "
            f"{max_chars} characters, but the prompt has {num_chars}",
            param="prompt",
            code="context_length_exceeded",
        )


async def off_loop(num_chars: int, work: Callable[[], _Result]) -> _Result:
    """Do it on a thread, unless it is quick, so that no stream waits for it.

    Args:
        num_chars: of the text, or as many as would take this work as long to tokenize.
    """
    if num_chars < _LONG_TEXT:
        return work()
    return await asyncio.to_thread(work)
