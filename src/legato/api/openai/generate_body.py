"""The body of POST /inference/v1/generate, as in vLLM, and the job made of it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, model_validator

from legato.api.bodies.answer_size import check_answer_size
from legato.api.bodies.body_model import AtMost, JobMaker, ModelRequest, Name, RequestModel, only
from legato.api.bodies.chat_tools import ToolChoice, Tools, functions_of
from legato.api.bodies.generation_options import (
    KVTransferRequest,
    NumLogprobs,
    SamplingOptions,
    ServiceOptions,
    StreamOptions,
    Strings,
    kv_transfer_of,
)
from legato.api.bodies.output_form import Form
from legato.api.job import AnswerOptions, End, Job, JobPrompt, Part, packed
from legato.api.limits import MAX_METADATA, MAX_TEMPLATE_VARIABLES
from legato.core.errors import InvalidRequestError
from legato.core.sampling_params import MAX_N, SamplingParams
from legato.engine.client.requests import check_token_ids
from legato.language.message.message_syntax import MessageSyntax
from legato.language.message.tools import ToolFunction

OutputMode = Literal["tokens", "text", "derender"]
"""What an answer has beside tokens: nothing, their text, or the message that the text is."""


class GenerateTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer in tokens needs from its request.

    Attributes:
        request_id: as the client calls the request; None if it does not.
        output_mode: as in `OutputMode`.
    """

    request_id: str | None
    output_mode: OutputMode


class SentSamplingParams(SamplingOptions):
    """The sampling parameters of tokens."""

    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    """Completions of each prompt."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens to generate; by default `--default-max-tokens`, or what the context holds."""
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


class GenerateJobs(JobMaker):
    """Makes jobs of prompts in tokens."""

    def read(self, body: bytes) -> Iterator[Part | End]:
        """Yield the job of a body; raises as `RequestReader.read`."""
        request = self._parser.parse(GenerateRequest, body)
        syntax = None
        if request.output_mode == "derender":
            syntax = self._prompts.reply_syntax(
                request.token_ids,
                request.shown_functions,
                has_reasoned=bool(request.reasoning_ended),
            )
        sent, prompt = request.sampling_params, request.token_ids
        self._parser.check_completions(sent.n)
        check_token_ids(prompt, self._info.vocab_size, "token_ids")
        with in_sampling_params():
            params = yield from self._limited(
                self._params(sent, syntax), len(prompt), "sampling_params.max_tokens"
            )
        options = request.stream_options or StreamOptions()
        job = Job(
            operation="generate",
            prompts=(JobPrompt.of(prompt),),
            params=params,
            service=request.service_params(),
            answer=AnswerOptions(
                is_streamed=request.stream,
                include_usage=options.include_usage,
                continuous_usage_stats=options.continuous_usage_stats,
                returns_token_ids=request.return_token_ids,
                message_syntax=None if syntax is None or syntax.is_plain else syntax,
                field_names=_FIELD_NAMES,
            ),
            kv_transfer_params=kv_transfer_of(request.kv_transfer_params),
            terms=packed(
                GenerateTerms(request_id=request.request_id, output_mode=request.output_mode)
            ),
        )
        if not request.stream:
            with in_sampling_params():
                check_answer_size(job, self._info.max_model_len)
        yield job

    def _params(self, sent: SentSamplingParams, syntax: MessageSyntax | None) -> SamplingParams:
        marks = self._tokenizer.special_marks(syntax) if syntax else {}
        params = sent.params(self._defaults.sampling, kept_special_tokens=tuple(marks.values()))
        return self._known(self._forms.resolved(params))


_FIELD_NAMES = {
    "prompt": "token_ids",
    **{
        name: f"sampling_params.{name}"
        for name in ("max_tokens", "min_tokens", "logit_bias", "stop_token_ids", "bad_words")
    },
}
