"""Prompts for an engine's client side, and what their completions say."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager

from legato.core.outputs import RequestOutput
from legato.core.pooling import PromptPooling
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.engine.client.engine import Engine
from legato.engine.client.requests import build_requests
from legato.engine.client.submissions import Submission
from legato.language.completion import CompletionDelta, CompletionStream

_numbers = itertools.count()


def submitted(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    take: Callable[[int, CompletionDelta], object] = lambda *_: None,
    *,
    service: ServiceParams | None = None,
    pooling: PromptPooling | None = None,
) -> AbstractAsyncContextManager[Submission]:
    """Submit prompts. Args: take: called with the index of a completion and each of its deltas."""
    streams: list[CompletionStream] = []

    def requests() -> Iterator[AddRequest]:
        for prompt in prompts:
            built = build_requests(
                prompt,
                params,
                service=service or ServiceParams(),
                request_id=f"{next(_numbers)}-r",
                info=engine.info,
                eos_token_ids=engine.defaults.eos_token_ids,
                arrival_time_s=time.monotonic(),
                pooling=pooling,
            )
            for index, request in enumerate(built):
                streams.append(CompletionStream(index, request, engine.vocabulary))
                yield request

    def take_output(index: int, output: RequestOutput, received_s: float) -> bool:
        take(index, streams[index].push(output, received_s))
        return not streams[index].needs_abort

    return engine.submitted(requests(), take_output)
