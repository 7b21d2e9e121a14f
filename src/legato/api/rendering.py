"""The `/render` endpoints: prompts as the model receives them, for /inference/v1/generate."""

from collections.abc import Iterator
from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response

from legato.api.anthropic.message_body import MessagesRequest
from legato.api.arrival import Arrival
from legato.api.bodies.body_model import Kind
from legato.api.bodies.generation_options import RenderTerms
from legato.api.context import ApiContext, ArrivalDep, ContextDep
from legato.api.http.bodies import JsonBytes
from legato.api.http.error_responses import AnthropicErrorBody
from legato.api.http.json_text import array, encode_json, json_pieces, listed, numbers
from legato.api.http.outlet import PacedResponse
from legato.api.job import JobPrompt
from legato.api.openai.chat_body import ChatRequest
from legato.api.openai.completion_body import CompletionRequest
from legato.api.openai.generate_body import OutputMode
from legato.api.openapi import body_route
from legato.api.responses.response_body import ResponsesRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import TokenIds
from legato.engine.client.kv_tickets import KVTransferParams
from legato.language.message.message_syntax import MessageSyntax

router = APIRouter(tags=["tokenization"])

_NOT_SENT = (
    *("kept_special_tokens", "bad_words_token_ids", "truncate_prompt_tokens"),
    "thinking_limit",
)
"""Parameters that follow from others, or that are applied already."""
_PAIRS_PER_PIECE = 1024


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as the model receives it, in a request that /inference/v1/generate takes.

    Attributes:
        token_offsets: with `return_token_offsets`, where each token begins and ends in the text, in
            characters; null for a prompt in tokens.
        sampling_params: of `SamplingParams`, with the model's defaults.
        reasoning_ended: whether the answer begins outside reasoning; null for models without any.
        parse_context: how the answer of a chat is read.
        features, ec_transfer_params: of input other than text; always null.
    """

    request_id: str
    token_ids: list[int]
    token_offsets: list[list[int]] | None
    features: None = None
    sampling_params: dict[str, Any]
    model: str
    reasoning_ended: bool | None
    return_token_ids: bool
    output_mode: OutputMode = "tokens"
    parse_context: dict[str, Any] | None
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
    slo_class: str
    tenant: str
    allow_best_effort: bool
    kv_transfer_params: KVTransferParams | None
    ec_transfer_params: None = None


@router.post(
    "/v1/chat/completions/render", **body_route(ChatRequest, RenderedPrompt, is_computed=False)
)
async def render_chat(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Return the prompt of such a request, in tokens."""
    [prompt] = await _rendered(context, "render_chat", body, arrival, prefix="chatcmpl")
    return PacedResponse(json_pieces(prompt), context.turns)


@router.post(
    "/v1/completions/render",
    **body_route(CompletionRequest, RenderedPrompt, is_computed=False, is_list=True),
)
async def render_completions(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Return the prompt of such a request, in tokens."""
    prompts = await _rendered(context, "render_completions", body, arrival, prefix="cmpl")
    return PacedResponse(json_pieces(listed(prompts)), context.turns)


@router.post(
    "/v1/messages/render",
    **body_route(MessagesRequest, RenderedPrompt, is_computed=False, error_body=AnthropicErrorBody),
)
async def render_messages(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Return the prompt of such a request, in tokens."""
    [prompt] = await _rendered(context, "render_messages", body, arrival, prefix="chatcmpl")
    return PacedResponse(json_pieces(prompt), context.turns)


@router.post(
    "/v1/responses/render", **body_route(ResponsesRequest, RenderedPrompt, is_computed=False)
)
async def render_response(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Return the prompt of such a request, in tokens."""
    [prompt] = await _rendered(context, "render_responses", body, arrival, prefix="resp")
    return PacedResponse(json_pieces(prompt), context.turns)


async def _rendered(
    context: ApiContext, kind: Kind, body: bytearray, arrival: Arrival, *, prefix: str
) -> list[RenderedPrompt]:
    """Return a request's prompts; their ids begin with the prefix."""
    job = await context.text.job(kind, body, arrival)
    terms = job.terms_as(RenderTerms)
    name = f"{prefix}-{arrival.named(terms.request_id)}"
    prompts = job.prompts
    names = [name] if len(prompts) == 1 else [f"{name}-{i}" for i in range(len(prompts))]
    service = job.service.of_key(arrival.tenant, arrival.cache_owner)
    return [
        RenderedPrompt(
            request_id=name,
            token_ids=array(numbers(prompt.token_ids)),
            token_offsets=None if prompt.offsets is None else array(_pairs(prompt.offsets)),
            sampling_params=_sent(job.params, context.engine.info.max_model_len, prompt),
            model=context.model_name,
            reasoning_ended=_reasoning_ended(job.answer.message_syntax),
            return_token_ids=job.answer.returns_token_ids,
            parse_context=_raw(terms.parse_context),
            stream=job.answer.is_streamed,
            stream_options=_raw(terms.stream_options),
            cache_salt=service.cache_nonce or service.cache_salt,
            priority=service.priority,
            slo_class=service.slo_class,
            tenant=service.tenant,
            allow_best_effort=service.allow_best_effort,
            kv_transfer_params=job.kv_transfer_params,
        )
        for name, prompt in zip(names, prompts, strict=True)
    ]


def _sent(params: SamplingParams, max_model_len: int, prompt: JobPrompt) -> dict[str, Any]:
    sent = {
        name: value
        for name, value in msgspec.structs.asdict(params).items()
        if name not in _NOT_SENT
    }
    if params.max_tokens is None:
        sent["max_tokens"] = max(1, max_model_len - len(prompt.token_ids))
    return sent


def _reasoning_ended(syntax: MessageSyntax | None) -> bool | None:
    return None if syntax is None or syntax.reasoning is None else not syntax.is_reasoning_open


def _raw(data: bytes | None) -> Any:
    return None if data is None else msgspec.Raw(data)


def _pairs(offsets: TokenIds) -> Iterator[bytes]:
    """Yield items for `array`, many pairs in each."""
    step = 2 * _PAIRS_PER_PIECE
    for start in range(0, len(offsets), step):
        part = offsets[start : start + step]
        yield encode_json(list(zip(part[::2], part[1::2], strict=True)))[1:-1]
