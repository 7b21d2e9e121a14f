"""Options of sampling and of service, and other servers' names for them."""

import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic.json_schema import JsonSchemaValue

from legato.api.bodies.body_model import AtMost, ModelRequest, Name, RequestModel, only, set_fields
from legato.api.bodies.hints import Hints, OtherServersHints, PeersHints, UnaskedOptions
from legato.api.bodies.output_form import OutputForm
from legato.api.job import AnswerOptions
from legato.core.errors import InvalidRequestError
from legato.core.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_REPETITION_PENALTY,
    MAX_STOP,
    SEED_LIMIT,
    TOP_K_LIMIT,
    SamplingParams,
)
from legato.core.slo import INTERACTIVE, MAX_CACHE_SALT, MAX_PRIORITY, ServiceParams
from legato.core.tenant import DEFAULT_TENANT, TENANT_PATTERN
from legato.engine.client.kv_tickets import KVTransferParams


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else (value,)


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _integer_keys(value: Any) -> Any:
    """Convert token ids in keys to integers: JSON has only string keys."""
    if not isinstance(value, dict):
        return value
    wrong = [key for key in value if not _TOKEN_ID_KEY.fullmatch(key)][:_NAMED_KEYS]
    if wrong:
        named = " or ".join(map(repr, wrong))
        raise ValueError(f"the keys must be token ids in plain digits, not {named}")
    return {int(key): bias for key, bias in value.items()}


def _one_or_several(item: JsonSchemaValue) -> WithJsonSchema:
    several = {"type": "array", "items": item, "maxItems": MAX_STOP}
    return WithJsonSchema({"anyOf": [item, several]})


_NONCE_BYTES = 16
_SENT_SERVICE = set(ServiceParams.__struct_fields__) - {"cache_owner", "cache_nonce"}
"""Fields of `ServiceParams` that a client sends; the other two are the server's."""
_NAMED_KEYS = 8
"""An error names so many wrong keys at most."""
_TOKEN_ID_KEY = re.compile("0|[1-9][0-9]{0,18}")
"""One spelling for each number: "01" beside "1" would be the same key twice."""
_TOKEN_ID = {"type": "integer", "minimum": 0}
_BIASES = {
    "type": "object",
    "propertyNames": {"pattern": f"^({_TOKEN_ID_KEY.pattern})$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MAX_LOGIT_BIAS,
}

Strings = Annotated[
    tuple[str, ...],
    Field(fail_fast=True),
    AtMost(MAX_STOP),
    BeforeValidator(_as_tuple),
    _one_or_several({"type": "string", "minLength": 1}),
]
TokenIds = Annotated[
    tuple[int, ...],
    Field(fail_fast=True),
    AtMost(MAX_STOP),
    BeforeValidator(_as_tuple),
    _one_or_several(_TOKEN_ID),
]
AllowedTokenIds = Annotated[
    tuple[int, ...],
    Field(fail_fast=True),
    AtMost(MAX_ALLOWED_TOKEN_IDS),
    BeforeValidator(_listed),
    WithJsonSchema(
        {"type": "array", "items": _TOKEN_ID, "minItems": 1, "maxItems": MAX_ALLOWED_TOKEN_IDS}
    ),
]
LogprobTokenIds = Annotated[
    tuple[int, ...],
    Field(fail_fast=True),
    AtMost(MAX_LOGPROB_TOKEN_IDS),
    BeforeValidator(_listed),
    WithJsonSchema({"type": "array", "items": _TOKEN_ID, "maxItems": MAX_LOGPROB_TOKEN_IDS}),
]
BadWords = Annotated[
    tuple[str, ...],
    Field(fail_fast=True),
    AtMost(MAX_BAD_WORDS),
    BeforeValidator(_listed),
    WithJsonSchema(
        {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_BAD_WORDS}
    ),
]
LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_integer_keys),
    AtMost(MAX_LOGIT_BIAS),
    WithJsonSchema(_BIASES),
]
RepetitionPenalty = Annotated[
    float, Field(ge=1 / MAX_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(RequestModel):
    """What a stream has beside its deltas."""

    include_usage: bool = False
    """End with a chunk that counts tokens."""
    continuous_usage_stats: bool = False
    """Count tokens in every chunk."""
    include_obfuscation: Annotated[bool, only(False)] = False
    """Padding is not supported."""


class KVTransferRequest(RequestModel):
    """vLLM's parameters, as its routers send them; engines fill in null fields."""

    do_remote_prefill: bool = False
    """Fetch the prompt's blocks from another server."""
    do_remote_decode: bool = False
    """Keep the prompt's blocks for another server, as the answer says."""
    remote_host: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """The other server's `--kv-transfer-host`."""
    remote_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """The other server's `--kv-transfer-port`."""
    transfer_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Name of the transfer; made up if absent."""
    signature: Annotated[str, Field(max_length=64)] | None = None
    """Made with the fleet's key."""
    is_early: bool = False
    """The other server may not know the prompt yet."""
    remote_engine_id: Annotated[str | None, only(None)] = None
    """Address and name suffice."""
    remote_block_ids: Annotated[list[int] | None, only(None)] = None
    """Servers exchange them."""


def kv_transfer_of(asked: KVTransferRequest | None) -> KVTransferParams | None:
    """Return the parameters of a transfer that a request asks for."""
    if asked is None:
        return None
    names = KVTransferParams.__struct_fields__
    return KVTransferParams(**asked.model_dump(include=set(names)))


class RenderTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What rendered prompts need from their request.

    Attributes:
        request_id: as the client calls the request; None if it does not.
        stream_options, parse_context: as of `GenerateRequest`, in JSON; None if there are none.
    """

    request_id: str | None
    stream_options: bytes | None
    parse_context: bytes | None


class SamplingOptions(RequestModel):
    """Fields of `SamplingParams`, with the same meaning; unset ones are the model's defaults."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Softmax temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Keep the fewest most likely tokens whose probability reaches this."""
    top_k: Annotated[int, Field(ge=-1, lt=TOP_K_LIMIT)] | None = None
    """Keep this many most likely tokens; 0 or -1 keeps all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop tokens less likely than this fraction of the most likely one."""
    repetition_penalty: RepetitionPenalty | None = None
    """Makes tokens of prompt and output less likely, above 1."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted once from the logit of each token in the output."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted per occurrence in the output."""
    logit_bias: LogitBias | None = None
    """Added to the logits of these token ids."""
    allowed_token_ids: AllowedTokenIds | None = None
    """No other tokens are sampled."""
    bad_words: BadWords | None = None
    """Words that are not generated, by their usual tokens."""
    logprob_token_ids: LogprobTokenIds | None = None
    """Log probabilities of these tokens, not of the most likely ones."""
    seed: Annotated[int, Field(ge=-SEED_LIMIT, lt=SEED_LIMIT)] | None = None
    """Makes the tokens reproducible."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """End-of-sequence and stop tokens are not sampled before this many."""
    stop_token_ids: TokenIds | None = None
    """Token ids that end the output."""
    include_stop_str_in_output: bool | None = None
    """Keep the stop string in the text."""
    ignore_eos: bool | None = None
    """Go on past the end-of-sequence token."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text."""

    def sent_params(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that the client sent."""
        names = self.model_fields_set.intersection(SamplingParams.__struct_fields__)
        return {name: getattr(self, name) for name in names}


class ServiceOptions(RequestModel):
    """Fields of `ServiceParams`, with the same meaning."""

    slo_class: Name = INTERACTIVE
    """`interactive`, `batch`, or a class of `--slo-class`."""
    tenant: Annotated[str, Field(pattern=TENANT_PATTERN)] = DEFAULT_TENANT
    """The tenant, unless the API key names one."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """Lower goes earlier, within a tenant."""
    allow_best_effort: bool = False
    """If the TTFT SLO cannot be met, serve without a promise."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)] | None = None
    """Share cached blocks only with the same salt."""
    cache_prompt: bool = True
    """`false` shares no cached blocks."""

    def service_params(self) -> ServiceParams:
        """Return how to serve the request; the engine checks that its class exists."""
        nonce = None if self.cache_prompt else secrets.token_hex(_NONCE_BYTES)
        sent = {name: getattr(self, name) for name in _SENT_SERVICE}
        return ServiceParams(cache_nonce=nonce, **sent)


class GenerationOptions(SamplingOptions, ServiceOptions, PeersHints, ModelRequest):
    """Options of a generation request in any API."""

    stream: bool = False
    """Answer with server-sent events."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Keep this many last tokens of the prompt; -1 keeps what fits."""

    def shared_options(self) -> dict[str, Any]:
        """Return the options that the client sent, as JSON values."""
        known = GenerationOptions.model_fields.keys() - {"timings_per_token"}  # of chats alone
        names = self.model_fields_set & known
        return self.model_dump(mode="json", include=names)


class ReportedUsage(RequestModel):
    """OpenRouter's switch for counts of tokens."""

    include: bool = False
    """As `include_usage`."""


class GenerationRequest(OtherServersHints, Hints, UnaskedOptions, OutputForm, GenerationOptions):
    """A request to OpenAI's completion endpoints."""

    stream_options: StreamOptions | None = None
    """With `stream` only."""
    usage: ReportedUsage | None = None
    """OpenRouter's form of `stream_options.include_usage`."""
    repeat_penalty: RepetitionPenalty | None = None
    """Other name of `repetition_penalty` (Ollama)."""
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    """Changes nothing: `repeat_penalty` counts all tokens, and goes with -1 only."""
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    """Completions of each prompt."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Most tokens to generate, 16 by default; 0 with `echo` scores the prompt."""
    stop: Strings | None = None
    """Strings that end the output."""
    prompt_logprobs: NumLogprobs | None = None
    """Log probabilities of this many tokens at each prompt token."""
    return_token_ids: bool = False
    """Return the tokens of prompts and completions."""
    return_tokens_as_token_ids: bool = False
    """Log probabilities name tokens `token_id:5`."""
    return_token_offsets: bool = False
    """`/render` returns the tokens' places in the text."""
    timings_per_token: bool | None = None
    """Return llama-server's `timings`, in each piece of a stream, too."""
    return_progress: bool | None = None
    """With `stream`, report each step's part of the prompt as llama-server's `prompt_progress`."""
    kv_transfer_params: KVTransferRequest | None = None
    """Transfer of cached blocks [between servers](../guides/disaggregate.md)."""

    @model_validator(mode="after")
    def _take_other_names(self) -> "GenerationRequest":
        set_fields(self, "repeat_penalty", repetition_penalty=self.repeat_penalty)
        if self.repeat_penalty not in (None, 1) and self.repeat_last_n not in (None, -1):
            raise InvalidRequestError(
                "repeat_penalty counts all tokens of prompt and output, so repeat_last_n must be "
                "-1 or absent",
                param="repeat_last_n",
            )
        return self

    @property
    def kv_transfer(self) -> KVTransferParams | None:
        """The parameters of a transfer of the prompt's blocks between engines."""
        return kv_transfer_of(self.kv_transfer_params)

    def answer_options(self, **known: Any) -> AnswerOptions:
        """Return what the answer reads. Args: known: further fields."""
        options = self.stream_options or StreamOptions()
        is_counted = self.usage is not None and self.usage.include
        return AnswerOptions(
            is_streamed=self.stream,
            include_usage=options.include_usage or is_counted,
            continuous_usage_stats=options.continuous_usage_stats,
            returns_token_ids=self.return_token_ids,
            names_tokens_by_id=self.return_tokens_as_token_ids,
            times_pieces=bool(self.timings_per_token),
            reports_progress=self.stream and bool(self.return_progress),
            **known,
        )

    def render_terms(self, parse_context: bytes | None = None) -> RenderTerms:
        """Return the terms of a request that is rendered. Args: parse_context: of a chat."""
        options = self.stream_options if self.stream else None
        return RenderTerms(
            request_id=self.request_id,
            stream_options=None if options is None else msgspec.json.encode(options.model_dump()),
            parse_context=parse_context,
        )

    @model_validator(mode="after")
    def _check_streaming(self) -> "GenerationRequest":
        if self.stream_options not in (None, StreamOptions()) and not self.stream:
            raise InvalidRequestError(
                "stream_options goes with stream: true only", param="stream_options"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs is not available with stream: true", param="prompt_logprobs"
            )
        asked = self.kv_transfer_params
        if self.stream and asked is not None and asked.do_remote_decode:
            raise InvalidRequestError(
                "do_remote_decode is not available with stream: true", param="kv_transfer_params"
            )
        return self

    def sampling_params(self, defaults: Mapping[str, Any], **decided: Any) -> SamplingParams:
        """Return the sampling parameters: the request's, over the model's defaults.

        Args:
            defaults: key a field name of `SamplingParams`.
            decided: fields that override the request's.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        form = {} if self.output_form is None else {"structured_outputs": self.output_form}
        return SamplingParams(**{**defaults, **self.sent_params(), **form, **decided})
