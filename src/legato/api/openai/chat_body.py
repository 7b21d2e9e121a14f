"""The body of POST /v1/chat/completions."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from legato.api.bodies.body_model import AtMost, only
from legato.api.bodies.chat_messages import Messages, TemplateOptions
from legato.api.bodies.chat_tools import (
    FunctionChoice,
    Functions,
    Tool,
    ToolChoice,
    ToolUse,
    tool_use,
)
from legato.api.bodies.generation_options import GenerationRequest, NumLogprobs
from legato.api.bodies.neutral import UnaskedOfChat
from legato.api.job import Warned
from legato.core.errors import InvalidRequestError

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(UnaskedOfChat, TemplateOptions, GenerationRequest):
    """Attributes: `functions` and `function_call` are OpenAI's older names of tools."""

    messages: Annotated[Messages, Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None

    add_special_tokens: Annotated[bool, only(False)] | None = None
    modalities: Annotated[list[str], only(["text"]), AtMost(1)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    functions: Functions | None = None
    function_call: FunctionChoice | None = None
    reasoning_effort: ReasoningEffort | None = None

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
        if self.functions and (self.tools or self.tool_choice):
            raise InvalidRequestError(
                "functions is the old name of tools; give one of them", param="functions"
            )
        if self.function_call and self.tools:
            raise InvalidRequestError(
                "function_call is the old name of tool_choice; it goes with functions only",
                param="function_call",
            )
        for param, choice, name, tools in (
            ("tool_choice", self.tool_choice, "tools", self.tools),
            ("function_call", self.function_call, "functions", self.functions),
        ):
            if choice is not None and choice.needs_tools and not tools:
                raise InvalidRequestError(
                    f"{param} asks for a call, but there are no {name}", param=param
                )
        return self

    @property
    def described_tools(self) -> list[tuple[str, Tool]]:
        """Return all tools, each with the path of its description."""
        if self.functions:
            return [
                (f"functions.{i}", Tool(type="function", function=function))
                for i, function in enumerate(self.functions)
            ]
        return [(f"tools.{i}.function", tool) for i, tool in enumerate(self.tools or ())]

    @property
    def tool_use(self) -> ToolUse:
        """Raises InvalidRequestError: the choice names a function that is not among the tools."""
        is_legacy = bool(self.functions)
        return tool_use(
            [tool for _, tool in self.described_tools],
            self.function_call if is_legacy else self.tool_choice,
            is_parallel=self.parallel_tool_calls and not is_legacy,
            param="function_call" if is_legacy else "tool_choice",
        )

    def unheeded_thinking(self, *, reads_effort: bool) -> Iterator[Warned]:
        """Yield warnings about limits of thinking that do not hold for a model that may think.

        Args:
            reads_effort: whether the chat template reads `reasoning_effort`.
        """
        if self.thinking_token_budget not in (None, -1):
            yield Warned(
                "thinking_token_budget is not enforced; max_tokens bounds thinking, too",
                "thinking_token_budget",
            )
        if self.enable_thinking is False:
            yield Warned(
                "enable_thinking has no effect: this model's chat template cannot switch it off",
                "enable_thinking",
            )
        if not reads_effort:
            yield Warned(
                "reasoning_effort has no effect: this model's chat template does not read it",
                "reasoning_effort",
            )

    @property
    def output_limit(self) -> int | None:
        """Most tokens to generate; None means all that fit in the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
