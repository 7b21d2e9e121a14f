"""POST /v1/chat/completions."""

import time
from http import HTTPStatus

from fastapi import APIRouter
from fastapi.responses import Response

from legato.server.context import ArrivalDep, ContextDep
from legato.server.generation.answer import respond
from legato.server.generation.job import Job, run_job
from legato.server.generation.prompts import chat_token_ids, check_text_fits
from legato.server.http.errors import naming_fields
from legato.server.http.json_route import JsonRoute
from legato.server.openai.chat_format import ChatAnswer, ChatFormat
from legato.server.openai.chat_request import ChatRequest
from legato.server.openapi import responses

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


@router.post(
    "/v1/chat/completions",
    responses=responses(
        ChatAnswer,
        errors=(HTTPStatus.NOT_FOUND, HTTPStatus.INTERNAL_SERVER_ERROR),
        streams=True,
    ),
)
async def create_chat_completion(
    body: ChatRequest, context: ContextDep, arrival: ArrivalDep
) -> Response:
    """Answer a conversation."""
    context.check_model(body.model)
    context.check_completions(body.n)
    answer_format = ChatFormat(
        context.client.tokenizer,
        answer_id=f"chatcmpl-{arrival.request_id}",
        created=int(time.time()),
        model=context.model_name,
    )
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    with naming_fields(prompt="messages", logprobs="top_logprobs", max_tokens=limit_name):
        params = body.sampling_params(
            context.client.defaults.sampling,
            max_tokens=body.output_limit,
            logprobs=body.num_logprobs,
        )
        check_text_fits(context, sum(len(message.content) for message in body.messages))
        prompt = await chat_token_ids(context, body.messages, body)
        job = Job(
            arrival=arrival,
            operation="chat",
            is_streamed=body.stream,
            prompts=[prompt],
            params=params,
            service=body.service_params(),
        )
        return await respond(job, run_job(context, job), answer_format, body)
