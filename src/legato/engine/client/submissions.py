"""Requests that were submitted and have not ended, with their output streams."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager

from legato.checkpoint.defaults import ModelDefaults
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AddRequest
from legato.core.vocabulary import Vocabulary
from legato.engine.client.deliveries import StreamDelivery
from legato.engine.client.requests import build_requests
from legato.engine.client.submission import Prompts, Submission, Take
from legato.engine.errors import OverloadedError, failure
from legato.engine.process.engine_messages import EngineInfo
from legato.language.completion import CompletionStream

logger = logging.getLogger(__name__)


class Unfinished:
    """A request that has not ended.

    Attributes:
        prompt_index: in its submission.
        request: as sent, also if it is sent again.
        stream: turns its outputs into deltas.
        has_begun: whether it has any output.
        delivery: measures when its tokens were delivered.
    """

    def __init__(
        self,
        submission: Submission,
        prompt_index: int,
        request: AddRequest,
        stream: CompletionStream,
    ) -> None:
        self.submission = submission
        self.prompt_index = prompt_index
        self.request = request
        self.stream = stream
        self.delivery = StreamDelivery(request.service.slo_class)
        self.has_begun = False


class Submissions:
    """All requests that have not ended.

    Args:
        info: of the model that they are for.
        check_running: raises if no engine can take them.
        send: sends a request to the engine.
        abort: aborts a sent request by its id, after it was forgotten here.
    """

    def __init__(
        self,
        info: EngineInfo,
        vocabulary: Vocabulary,
        defaults: ModelDefaults,
        *,
        check_running: Callable[[], None],
        send: Callable[[AddRequest], None],
        abort: Callable[[str], None],
    ) -> None:
        self._info = info
        self._vocabulary = vocabulary
        self._defaults = defaults
        self._check_running = check_running
        self._send = send
        self._send_abort = abort
        self._unfinished: dict[str, Unfinished] = {}  # key: engine request id
        self._ids = itertools.count()

    def __len__(self) -> int:
        return len(self._unfinished)

    def __iter__(self) -> Iterator[Unfinished]:
        """Iterate over a copy, in the order in which they came."""
        return iter(tuple(self._unfinished.values()))

    def get(self, request_id: str) -> Unfinished | None:
        """Return a request; None if it has ended."""
        return self._unfinished.get(request_id)

    @asynccontextmanager
    async def submitted(self, prompts: Prompts, take: Take) -> AsyncGenerator[Submission]:
        """See `Engine.submitted`."""
        submission = Submission(len(prompts.token_ids) * prompts.params.n, take)
        try:
            for index, prompt in enumerate(prompts.token_ids):
                sent_s = time.monotonic()
                came_s = sent_s if prompts.arrived_s is None else prompts.arrived_s
                requests = build_requests(
                    prompt,
                    prompts.params,
                    service=prompts.service,
                    request_id=f"{next(self._ids)}-{prompts.request_id}",
                    info=self._info,
                    eos_token_ids=self._defaults.eos_token_ids,
                    arrival_time_s=came_s,
                    reading_s=sent_s - came_s,
                    kv_transfer=prompts.kv_transfer,
                    pooling=prompts.pooling,
                )
                self._check_running()
                for i, request in enumerate(requests):
                    stream = CompletionStream(i, request, self._vocabulary)
                    self._add(Unfinished(submission, index, request, stream))
                    await asyncio.sleep(0)  # each one copies the whole prompt
                if submission.ended.is_set():
                    break
            yield submission
        finally:
            self._abort(submission)

    def take(self, outputs: Iterable[RequestOutput], now_s: float) -> list[Unfinished]:
        """Deliver all outputs in one pass; return the requests that got promised tokens."""
        given: list[Unfinished] = []
        for output in outputs:
            one = self._unfinished.get(output.request_id)
            if one is not None:
                self._take(one, output, now_s)
                if output.new_token_ids and not output.is_promise_waived:
                    given.append(one)
        return given

    def note(self, given: Iterable[Unfinished], note: Callable[[StreamDelivery], object]) -> None:
        """Measure the delivery to each stream; an error ends only that stream's submission."""
        for one in given:
            try:
                note(one.delivery)
            except Exception as error:
                logger.exception("request %s: cannot note a delivery", one.request.request_id)
                self.fail(one, error)

    def fail(self, one: Unfinished, error: Exception) -> None:
        """End the request's whole submission with an error."""
        one.submission.fail(error)
        self._abort(one.submission)

    def _add(self, one: Unfinished) -> None:
        request_id = one.request.request_id
        one.submission.request_ids.append(request_id)
        self._unfinished[request_id] = one
        self._send(one.request)

    def _take(self, one: Unfinished, output: RequestOutput, now_s: float) -> None:
        one.has_begun = True
        try:
            _raise_if_failed(output)
            delta = one.stream.push(output, now_s)
            if delta.finish_reason is not None:
                self._forget(output.request_id, abort=one.stream.needs_abort)
            one.submission.take(one.prompt_index, delta)
        except Exception as error:  # any error ends only its own stream
            self.fail(one, error)

    def _forget(self, request_id: str, *, abort: bool) -> None:
        known = self._unfinished.pop(request_id, None) is not None
        if known and abort:
            self._send_abort(request_id)

    def _abort(self, submission: Submission) -> None:
        """Abort the running requests of a submission."""
        for request_id in submission.request_ids:
            self._forget(request_id, abort=True)


def _raise_if_failed(output: RequestOutput) -> None:
    if output.finish_reason is FinishReason.REFUSED:
        assert output.refusal is not None
        raise OverloadedError(
            output.error or "overloaded",
            reason=output.refusal,
            retry_after_s=output.retry_after_s or 0.0,
        )
    if output.finish_reason is FinishReason.ERROR:
        raise failure(output)
