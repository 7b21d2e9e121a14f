"""What POST /v1/chat/completions takes."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from legato.core.errors import InvalidRequestError
from legato.server.requests.generation import GenerationRequest, NumLogprobs
from legato.server.requests.messages import Messages, TemplateOptions
from legato.server.requests.neutral import UnaskedOfChat
from legato.server.requests.request_model import AtMost, only


class ChatRequest(UnaskedOfChat, TemplateOptions, GenerationRequest):
    """Tools and images are refused: Legato has none of them."""

    messages: Annotated[Messages, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None

    add_special_tokens: Annotated[bool, only(False)] | None = None
    modalities: Annotated[list[str], only(["text"]), AtMost(1)] | None = None
    tools: Annotated[list[Any], only([])] | None = None
    tool_choice: Annotated[Any, only("none")] = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
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
