"""The common fields of chat and completion requests."""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic.json_schema import JsonSchemaValue

from legato.api.bodies.body_model import AtMost, ModelRequest, Name, RequestModel, only
from legato.api.bodies.neutral import Hints, PeersHints, UnaskedOptions
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
from legato.engine.client.requests import check_token_ids, with_bad_words


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
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(RequestModel):
    """Attributes: `continuous_usage_stats` puts the usage so far on every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[bool, only(False)] = False


class KVTransferRequest(RequestModel):
    """vLLM's parameters, as its routers send them; engines fill in null fields."""

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    remote_host: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    remote_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    transfer_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    signature: Annotated[str, Field(max_length=64)] | None = None
    is_early: bool = False
    remote_engine_id: Annotated[str | None, only(None)] = None
    remote_block_ids: Annotated[list[int] | None, only(None)] = None


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
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=TOP_K_LIMIT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: (
        Annotated[float, Field(ge=1 / MAX_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None
    ) = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    bad_words: BadWords | None = None
    logprob_token_ids: LogprobTokenIds | None = None
    seed: Annotated[int, Field(ge=-SEED_LIMIT, lt=SEED_LIMIT)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    def sent_params(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that the client sent."""
        names = self.model_fields_set.intersection(SamplingParams.__struct_fields__)
        return {name: getattr(self, name) for name in names}


class ServiceOptions(RequestModel):
    """Fields of `ServiceParams`, with the same meaning.

    Attributes: `cache_prompt`: false shares no cached blocks with other requests.
    """

    slo_class: Name = INTERACTIVE
    tenant: Annotated[str, Field(pattern=TENANT_PATTERN)] = DEFAULT_TENANT
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    allow_best_effort: bool = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)] | None = None
    cache_prompt: bool = True

    def service_params(self) -> ServiceParams:
        """Return how to serve the request; the engine checks that its class exists."""
        return ServiceParams(
            slo_class=self.slo_class,
            tenant=self.tenant,
            priority=self.priority,
            allow_best_effort=self.allow_best_effort,
            cache_salt=self.cache_salt,
            cache_nonce=None if self.cache_prompt else secrets.token_hex(_NONCE_BYTES),
        )


class GenerationOptions(SamplingOptions, ServiceOptions, PeersHints, ModelRequest):
    """Options of a generation request in any API."""

    stream: bool = False
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None

    def shared_options(self) -> dict[str, Any]:
        """Return the options that the client sent, as JSON values."""
        names = self.model_fields_set & GenerationOptions.model_fields.keys()
        return self.model_dump(mode="json", include=names)


class GenerationRequest(Hints, UnaskedOptions, OutputForm, GenerationOptions):
    """A request to OpenAI's completion endpoints."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: Strings | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_token_offsets: bool = False
    kv_transfer_params: KVTransferRequest | None = None

    @property
    def kv_transfer(self) -> KVTransferParams | None:
        """The parameters of a transfer of the prompt's blocks between engines."""
        return kv_transfer_of(self.kv_transfer_params)

    def answer_options(self, **known: Any) -> AnswerOptions:
        """Return what the answer reads. Args: known: further fields."""
        options = self.stream_options or StreamOptions()
        return AnswerOptions(
            is_streamed=self.stream,
            include_usage=options.include_usage,
            continuous_usage_stats=options.continuous_usage_stats,
            returns_token_ids=self.return_token_ids,
            names_tokens_by_id=self.return_tokens_as_token_ids,
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


def with_known_tokens(
    params: SamplingParams, encode: Callable[[str], Sequence[int]], vocab_size: int
) -> SamplingParams:
    """Check that token ids exist, and convert bad words to tokens.

    Args:
        encode: returns the token ids of a text, without special tokens.

    Raises:
        InvalidRequestError: the model has no such token.
    """
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        check_token_ids(getattr(params, name) or (), vocab_size, name)
    return with_bad_words(params, encode)
