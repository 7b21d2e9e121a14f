"""The body of a request for chat completions."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from legato.core.errors import InvalidRequestError
from legato.server.openai.fields import MessageText, RequestModel, only
from legato.server.openai.generation_request import GenerationRequest, NumLogprobs

# Arguments of the template renderer that are not for the template.
_RESERVED = ("self", "messages", "chat_template", "add_generation_prompt", "continue_final_message")


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


class ChatRequest(TemplateOptions, GenerationRequest):
    """Tools, images and structured output are refused: Legato has none of them."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None

    add_special_tokens: Annotated[bool, only(False)] | None = None
    response_format: Annotated[dict[str, Any], only({"type": "text"})] | None = None
    modalities: Annotated[list[str], only(["text"])] | None = None
    tools: Annotated[list[Any], only([])] | None = None
    tool_choice: Annotated[Any, only("none")] = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs goes with logprobs: true only", param="top_logprobs"
            )
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidRequestError(
                "max_tokens is the old name of max_completion_tokens; they must not differ",
                param="max_completion_tokens",
            )
        return self

    @property
    def output_limit(self) -> int | None:
        """Most tokens to generate; None takes the room that is left."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
