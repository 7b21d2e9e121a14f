"""POST /v1/completions."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cache
from http import HTTPStatus

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response

from legato.core.outputs import FinishReason
from legato.core.sampling_params import SamplingParams
from legato.server.context import ArrivalDep, Context, ContextDep
from legato.server.generation.answer import respond
from legato.server.generation.job import Job, PromptDelta, run_job
from legato.server.generation.prompts import check_text_fits, prompt_token_ids
from legato.server.http.json_route import JsonRoute
from legato.server.openai.completion_format import CompletionAnswer, CompletionFormat
from legato.server.openai.completion_request import CompletionRequest, Prompt
from legato.server.openapi import responses

router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])


@router.post(
    "/v1/completions",
    responses=responses(
        CompletionAnswer,
        errors=(HTTPStatus.NOT_FOUND, HTTPStatus.INTERNAL_SERVER_ERROR),
        streams=True,
    ),
)
async def create_completion(
    body: CompletionRequest, context: ContextDep, arrival: ArrivalDep
) -> Response:
    """Complete one prompt or several."""
    context.check_model(body.model)
    context.check_completions(body.n, len(body.prompt))
    for prompt in body.prompt:
        check_text_fits(context, len(prompt))
    job = Job(
        arrival=arrival,
        operation="text_completion",
        is_streamed=body.stream,
        prompts=await prompt_token_ids(
            context, body.prompt, add_special_tokens=body.add_special_tokens
        ),
        params=_sampling_params(context, body),
        service=body.service_params(),
    )
    answer_format = CompletionFormat(
        context.client.tokenizer,
        body,
        job,
        # Not before the prompt is known to have no token that does not exist.
        cache(lambda index: _text(context, body.prompt[index], body)),
        answer_id=f"cmpl-{arrival.request_id}",
        created=int(time.time()),
        model=context.model_name,
    )
    deltas = run_job(context, job)
    if body.is_echo_only:
        deltas = _without_output(deltas)
    return await respond(job, deltas, answer_format, body)


def _sampling_params(context: Context, body: CompletionRequest) -> SamplingParams:
    decided: dict[str, int] = {}
    if body.is_echo_only:
        decided["max_tokens"] = 1  # the engine generates at least one, which is then dropped
    if body.echo and body.logprobs is not None:
        decided["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return body.sampling_params(context.client.defaults.sampling, **decided)


def _text(context: Context, prompt: Prompt, body: CompletionRequest) -> str:
    if isinstance(prompt, str):
        return prompt
    return context.client.tokenizer.decode(prompt, body.skip_special_tokens is not False)


async def _without_output(
    deltas: AsyncGenerator[PromptDelta, None],
) -> AsyncGenerator[PromptDelta, None]:
    async with aclosing(deltas):
        async for prompt_index, delta in deltas:
            yield (
                prompt_index,
                msgspec.structs.replace(
                    delta,
                    text="",
                    token_ids=(),
                    logprobs=None if delta.logprobs is None else (),
                    finish_reason=delta.finish_reason and FinishReason.LENGTH,
                    stop_reason=None,
                ),
            )
