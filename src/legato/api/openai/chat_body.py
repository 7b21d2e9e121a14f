"""The body of POST /v1/chat/completions."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from legato.api.bodies.body_model import AtMost, RequestModel, only, set_fields
from legato.api.bodies.chat_messages import Messages, TemplateOptions
from legato.api.bodies.chat_tools import (
    FunctionChoice,
    Functions,
    ToolChoice,
    functions_of,
    tool_use,
)
from legato.api.bodies.generation_options import GenerationRequest, NumLogprobs
from legato.api.bodies.hints import UnaskedOfChat
from legato.api.job import Warned
from legato.core.errors import InvalidRequestError
from legato.language.message.tools import ToolUse

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ThinkingSwitch(RequestModel):
    """Thinking, in the form of Anthropic, Z.ai and others."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    """Whether to think; `adaptive` and `auto` leave it to the model."""
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    """As `thinking_token_budget`."""
    clear_thinking: bool | None = None
    """Variable of the chat template."""


class ReasoningSwitch(RequestModel):
    """Thinking, in OpenRouter's form."""

    effort: ReasoningEffort | None = None
    """As `reasoning_effort`."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """As `thinking_token_budget`."""
    enabled: bool | None = None
    """As `enable_thinking`."""
    exclude: Annotated[bool, only(False)] | None = None
    """Reasoning is always returned."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Changes nothing: reasoning is returned whole."""


class ChatRequest(UnaskedOfChat, TemplateOptions, GenerationRequest):
    """A conversation to answer."""

    messages: Annotated[Messages, Field(min_length=1)]
    """The conversation."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens to generate; by default `--default-max-tokens`, or what the context holds."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """New name of `max_tokens`."""
    logprobs: bool = False
    """Return log probabilities of the sampled tokens."""
    top_logprobs: NumLogprobs | None = None
    """Log probabilities of this many most likely tokens, with `logprobs`."""

    add_special_tokens: Annotated[bool, only(False)] | None = None
    """The chat template adds them."""
    modalities: Annotated[list[str], only(["text"]), AtMost(1)] | None = None
    """Only text is supported."""
    tool_choice: ToolChoice | None = None
    """Which functions may or must be called, in OpenAI's forms."""
    parallel_tool_calls: bool = True
    """Allow several calls in one message."""
    functions: Functions | None = None
    """Old name of `tools`; calls come as `function_call`."""
    function_call: FunctionChoice | None = None
    """Old name of `tool_choice`."""
    reasoning_effort: ReasoningEffort | None = None
    """Effort of thinking, if the chat template reads it."""
    thinking: ThinkingSwitch | None = None
    """Thinking, in the form of Anthropic and Z.ai."""
    reasoning: ReasoningSwitch | None = None
    """Thinking, in OpenRouter's form."""
    think: bool | Literal["low", "medium", "high"] | None = None
    """Other name of `enable_thinking` (Ollama), or an effort."""
    num_predict: Annotated[int, Field(ge=-2)] | None = None
    """Other name of `max_tokens` (Ollama); -1 and -2 set no limit."""

    @model_validator(mode="after")
    def _take_other_forms(self) -> "ChatRequest":
        if self.num_predict is not None and self.num_predict >= 0:
            if not self.num_predict:
                raise InvalidRequestError("num_predict must not be 0", param="num_predict")
            set_fields(self, "num_predict", max_tokens=self.num_predict)
        if isinstance(self.think, bool):
            set_fields(self, "think", enable_thinking=self.think)
        else:
            set_fields(self, "think", reasoning_effort=self.think)
        if self.thinking is not None:
            sent = self.thinking
            switch = {"enabled": True, "disabled": False}.get(sent.type)
            budget = sent.budget_tokens
            set_fields(self, "thinking", enable_thinking=switch, thinking_token_budget=budget)
            if sent.clear_thinking is not None:
                variables = {"clear_thinking": sent.clear_thinking}
                self.chat_template_kwargs = variables | (self.chat_template_kwargs or {})
        if self.reasoning is not None:
            set_fields(
                self,
                "reasoning",
                reasoning_effort=self.reasoning.effort,
                thinking_token_budget=self.reasoning.max_tokens,
                enable_thinking=self.reasoning.enabled,
            )
        return self

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
    def tool_use(self) -> ToolUse:
        """Raises InvalidRequestError: the choice names a function that is not among the tools."""
        if self.functions:
            described = [
                function.plain(f"functions.{i}") for i, function in enumerate(self.functions)
            ]
            return tool_use(described, self.function_call, is_parallel=False, param="function_call")
        if not self.tools:
            return ToolUse()
        return tool_use(
            functions_of(self.tools),
            self.tool_choice,
            is_parallel=self.parallel_tool_calls,
            param="tool_choice",
        )

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort

    def unheeded_thinking(self, *, reads_effort: bool, unheld: int | None) -> Iterator[Warned]:
        """Yield warnings about limits of thinking that do not hold for a model that may think.

        Args:
            reads_effort: whether the chat template reads `reasoning_effort`.
            unheld: a budget, this request's or the server's, of a model whose marks of thinking are
                no tokens; None if there is no such budget.
        """
        if unheld is not None:
            yield Warned(
                "thinking_token_budget is not enforced; max_tokens bounds thinking, too",
                "thinking_token_budget",
            )
        if self.enable_thinking is False and (
            unheld is not None or self.thinking_token_budget != 0
        ):
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
