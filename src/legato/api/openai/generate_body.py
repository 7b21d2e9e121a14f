"""The body of POST /inference/v1/generate, as in vLLM, and the terms of prompts rendered for it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
from pydantic import Field, model_validator

from legato.api.bodies.body_model import AtMost, ModelRequest, Name, RequestModel, only
from legato.api.bodies.chat_tools import ToolChoice, Tools, functions_of
from legato.api.bodies.generation_options import (
    KVTransferRequest,
    NumLogprobs,
    SamplingOptions,
    ServiceOptions,
    StreamOptions,
    Strings,
)
from legato.api.bodies.output_form import Form
from legato.api.limits import MAX_METADATA, MAX_TEMPLATE_VARIABLES
from legato.api.openai.chat_body import ChatRequest
from legato.api.openai.completion_body import CompletionRequest
from legato.api.outcome import OutputMode, RenderTerms
from legato.core.errors import InvalidRequestError
from legato.core.sampling_params import MAX_N, SamplingParams
from legato.language.message.tools import ToolFunction


class SentSamplingParams(SamplingOptions):
    """The sampling parameters of tokens."""

    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    """Completions of each prompt."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens to generate; by default, as many as the context holds."""
    stop: Strings | None = None
    """Strings that end the output."""
    logprobs: NumLogprobs | None = None
    """Log probabilities of the sampled and of this many likely tokens."""
    prompt_logprobs: NumLogprobs | None = None
    """Log probabilities of this many tokens at each prompt token."""
    structured_outputs: Form | None = None
    """[Form](python.md#structuredoutputs) of the output, in vLLM's words."""
    detokenize: bool = True
    """Must be `true` with `stop` and for text."""
    spaces_between_special_tokens: bool | None = None
    """Changes nothing: there are none."""
    skip_clone: bool | None = None
    """Changes nothing: for vLLM's own copies."""
    flat_logprobs: Annotated[bool, only(False)] | None = None
    """Log probabilities are listed by token."""
    extra_args: Annotated[dict[str, Any], only({}), AtMost(0)] | None = None
    """None are supported."""
    output_kind: int | None = None
    """Changes nothing: `stream` decides."""

    def params(self, defaults: Mapping[str, Any], **decided: Any) -> SamplingParams:
        """Return the parameters over the model's defaults; `max_tokens` has none.

        Args:
            defaults: key a field name of `SamplingParams`.
            decided: fields that override the request's.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        sent = self.sent_params()
        if self.logprob_token_ids and self.logprobs is None:
            sent["logprobs"] = 0
        return SamplingParams(**{**defaults, "max_tokens": None, **sent, **decided})


class ParseContext(RequestModel):
    """How a rendered chat's answer is read as a message."""

    tools: Tools | None = None
    """Functions that the prompt shows."""
    tool_choice: ToolChoice | None = None
    """Changes nothing: the rendered prompt has it."""
    parallel_tool_calls: bool = True
    """Changes nothing: the rendered prompt has it."""
    include_reasoning: Annotated[bool, only(True)] | None = None
    """Reasoning is always returned."""
    chat_template_kwargs: Annotated[dict[str, Any], AtMost(MAX_TEMPLATE_VARIABLES)] | None = None
    """Changes nothing: the prompt is rendered."""
    history_tool_call_cnt: Annotated[int, Field(ge=0)] | None = None
    """Changes nothing: calls get random ids."""


class GenerateRequest(ServiceOptions, ModelRequest):
    """A prompt in tokens, as `/render` answers with it."""

    request_id: Name | None = None
    """Id of the request; the answer repeats it."""
    token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
    """The prompt."""
    token_offsets: list[Any] | None = None
    """Changes nothing: the server needs no text."""
    features: Annotated[dict[str, Any], only({}), AtMost(0)] | None = None
    """Only text is supported."""
    content_parts: Annotated[list[Any], only([]), AtMost(0)] | None = None
    """Only text is supported."""
    sampling_params: SentSamplingParams
    """How to choose tokens, and when to stop."""
    output_mode: OutputMode = "tokens"
    """Answer with tokens, with their text, too, or with a message."""
    parse_context: ParseContext | None = None
    """How to read a message, as `/render` returns it; calls need it."""
    reasoning_ended: bool | None = None
    """The answer begins after the reasoning."""
    reasoning_parser_kwargs: Annotated[dict[str, Any], AtMost(MAX_METADATA)] | None = None
    """Changes nothing: for vLLM's parsers."""
    return_token_ids: bool = False
    """Return the prompt's tokens; a stream has them in its first chunk."""
    stream: bool = False
    """Answer with server-sent events."""
    stream_options: StreamOptions | None = None
    """With `stream` only."""
    kv_transfer_params: KVTransferRequest | None = None
    """Transfer of cached blocks [between servers](../guides/disaggregate.md)."""
    ec_transfer_params: Annotated[dict[str, Any], only({}), AtMost(0)] | None = None
    """Only text is supported."""

    @model_validator(mode="after")
    def _check_together(self) -> "GenerateRequest":
        params = self.sampling_params
        if not params.detokenize and (params.stop or self.output_mode != "tokens"):
            what = "stop" if params.stop else f"output_mode {self.output_mode!r}"
            raise InvalidRequestError(
                f"{what} goes with detokenize: true only", param="sampling_params.detokenize"
            )
        if self.stream and self.output_mode == "derender":
            raise InvalidRequestError(
                "output_mode 'derender' is not available with stream: true", param="output_mode"
            )
        if self.stream_options not in (None, StreamOptions()) and not self.stream:
            raise InvalidRequestError(
                "stream_options goes with stream: true only", param="stream_options"
            )
        if self.stream and params.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs is not available with stream: true",
                param="sampling_params.prompt_logprobs",
            )
        asked = self.kv_transfer_params
        if self.stream and asked is not None and asked.do_remote_decode:
            raise InvalidRequestError(
                "do_remote_decode is not available with stream: true", param="kv_transfer_params"
            )
        return self

    @property
    def shown_functions(self) -> list[ToolFunction]:
        """The functions shown in the prompt."""
        shown = None if self.parse_context is None else self.parse_context.tools
        return functions_of(shown or ())


@contextmanager
def in_sampling_params() -> Iterator[None]:
    """Name the field that an error blames as a field of `sampling_params`."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = error.param and f"sampling_params.{error.param}"
        raise


def render_terms(request: ChatRequest | CompletionRequest) -> RenderTerms:
    """Return the terms of a request that is rendered."""
    options = request.stream_options if request.stream else None
    return RenderTerms(
        request_id=request.request_id,
        stream_options=None if options is None else msgspec.json.encode(options.model_dump()),
        parse_context=parse_context(request) if isinstance(request, ChatRequest) else None,
    )


def parse_context(request: ChatRequest) -> bytes:
    """Return the JSON of a `ParseContext`."""
    use = request.tool_use
    calls = [len(message.tool_calls or ()) for message in request.messages]
    context: dict[str, Any] = {
        "tools": [
            {"type": "function", "function": {**tool.described, "strict": tool.is_strict}}
            for tool in use.shown
        ]
        or None,
        "tool_choice": _choice(request) if use.shown else "none",
        "parallel_tool_calls": use.is_parallel,
        "include_reasoning": True,
        "chat_template_kwargs": request.template_variables,
        "history_tool_call_cnt": sum(calls),
    }
    return msgspec.json.encode(context)


def _choice(request: ChatRequest) -> Any:
    choice = request.tool_choice or request.function_call
    if choice is None:
        return "auto"
    named = choice.model_dump(exclude_none=True)
    return choice.type if named.keys() == {"type"} else named
