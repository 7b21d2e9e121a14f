"""Runs of responses in the background, in this process, with an engine that says nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from legato.api.arrival import Arrival
from legato.api.context import ApiContext
from legato.api.http.middleware import Lifecycle
from legato.api.job import AnswerOptions, Job, JobPrompt, packed
from legato.api.responses.background import BackgroundRun
from legato.api.responses.response_answer import ResponsesFormat
from legato.api.responses.response_body import ResponsesRequest
from legato.api.submit import JobRun
from legato.checkpoint.defaults import ModelDefaults
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.slo import INTERACTIVE, ServiceParams, SloClass
from legato.core.stats import CacheInfo, EngineStats
from legato.core.token_ids import token_array
from legato.engine.client.submissions import Submission, Take
from legato.observe.metrics.server_metrics import ServerMetrics


class _Said:
    """A `Vocabulary` that grows: each text that the model is to say is a token."""

    special_token_ids = frozenset[int]()

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def id_of(self, text: str) -> int:
        return self._ids.setdefault(text, len(self._ids))

    def token_bytes(self, token_id: int) -> bytes:
        return next(text for text, known in self._ids.items() if known == token_id).encode()


VOCABULARY: Any = _Said()


class SilentEngine:
    """Takes requests; a test sends the outputs.

    Attributes:
        submissions: in the order in which they came.
    """

    def __init__(self) -> None:
        self.vocabulary = VOCABULARY
        self.defaults = ModelDefaults(eos_token_ids=(), sampling={})
        self.info: Any = SimpleNamespace(
            generates=True, max_model_len=1000, vocab_size=10, slo_classes=[INTERACTIVE]
        )
        self.activity: Any = SimpleNamespace(records=SimpleNamespace(is_wanted=False))
        self.submissions: list[Submission] = []

    @asynccontextmanager
    async def submitted(
        self, requests: Iterable[AddRequest], take: Take
    ) -> AsyncIterator[Submission]:
        submission = Submission(take)
        for request in requests:
            submission.add(request.request_id)
        submission.close()
        self.submissions.append(submission)
        yield submission


def context() -> Any:
    """A server's context without a server."""
    cache = CacheInfo(num_blocks=1, block_size=1, dtype="", enable_prefix_caching=False)
    classes = {ServiceParams().slo_class: SloClass()}
    metrics = ServerMetrics("m", EngineStats, int, cache=cache, classes=classes, kept=dict)
    return ApiContext(
        engine=SilentEngine(),  # type: ignore[arg-type]
        text=SimpleNamespace(),  # type: ignore[arg-type]
        metrics=metrics,
        lifecycle=Lifecycle(),
        max_unread_tokens=1,
    )


ARRIVAL = Arrival("r", "a", 0.0, {})


def job(**fields: Any) -> Job:
    """Args: fields: of the request."""
    request = ResponsesRequest.model_validate({"input": "Hi", "background": True, **fields})
    return Job(
        operation="responses",
        prompts=(JobPrompt(token_array([1, 2])),),
        params=SamplingParams(max_tokens=100),
        service=ServiceParams(),
        answer=AnswerOptions(is_streamed=True),
        terms=packed(request.terms()),
    )


def background_run(a_context: Any, finish: Callable[[Any], bool], **fields: Any) -> BackgroundRun:
    """Start a run; `a_context` is as made by `context`. Args: fields: of the request."""
    a_job = job(**fields)
    response = ResponsesFormat(VOCABULARY, a_job, ARRIVAL, model="m", keep=finish)
    run = JobRun(a_context, a_job, ARRIVAL)
    return BackgroundRun(run, response, grown=lambda: None, finish=finish)


def say(submission: Submission, text: str, finish_reason: FinishReason | None = None) -> None:
    """Have the only request of a submission say a text in one token."""
    output = RequestOutput(
        request_id="q",
        new_token_ids=(VOCABULARY.id_of(text),),
        scheduled_s=0.0,
        finish_reason=finish_reason,
    )
    submission.take(0, output, 0.0)


async def iterations(number: int) -> None:
    """Let the event loop run so often."""
    for _ in range(number):
        await asyncio.sleep(0)
