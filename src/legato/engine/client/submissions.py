"""Requests that were submitted and have not ended, with the callers of their outputs."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager

from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AddRequest
from legato.engine.client.deliveries import StreamDelivery
from legato.engine.errors import OverloadedError, failure

logger = logging.getLogger(__name__)

Take = Callable[[int, RequestOutput, float], bool]
"""Takes each output of a submission as it comes.

Called with the index of the request in its submission, the output, and when it was received, on the
clock of `time.monotonic`. Returns False to abort the request, whose completion then counts as
ended. All streams are served in one pass a step, so it must be quick. An exception from it ends the
submission.
"""


class Submission:
    """The progress of requests submitted together. Made by `Engine.submitted`.

    Attributes:
        request_ids: of the requests that were sent.
        begun: set at the first output, or at the end if there was none.
        ended: set once all requests have ended, or an error has ended them.
    """

    def __init__(self, take: Take) -> None:
        self.request_ids: list[str] = []
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self._num_running = 0
        self._is_whole = False
        self._take = take
        self._error: Exception | None = None

    def add(self, request_id: str) -> int:
        """Count a request that is about to be sent; return its index."""
        self.request_ids.append(request_id)
        self._num_running += 1
        return len(self.request_ids) - 1

    def close(self) -> None:
        """Note that the last request was sent."""
        self._is_whole = True
        self._end_if_over()

    def take(self, index: int, output: RequestOutput, received_s: float) -> bool:
        """Deliver an output; return whether the caller wants more of this request."""
        goes_on = self._take(index, output, received_s)
        self.begun.set()
        if output.finish_reason is not None or not goes_on:
            self._num_running -= 1
            self._end_if_over()
        return goes_on

    def fail(self, error: Exception) -> None:
        """End the submission with an error. After its end, this has no effect."""
        if not self.ended.is_set():
            self._error = error
            self.begun.set()
            self.ended.set()

    def check(self) -> None:
        """Raises the error that ended the submission, if one did."""
        if self._error is not None:
            raise self._error

    def _end_if_over(self) -> None:
        if self._is_whole and not self._num_running:
            self.begun.set()
            self.ended.set()


class Unfinished:
    """A request that has not ended.

    Attributes:
        index: in its submission.
        request: as sent, also if it is sent again.
        has_begun: whether it has any output.
        delivery: measures when its tokens were delivered.
    """

    def __init__(self, submission: Submission, index: int, request: AddRequest) -> None:
        self.submission = submission
        self.index = index
        self.request = request
        self.delivery = StreamDelivery(request.service.slo_class)
        self.has_begun = False


class Submissions:
    """All requests that have not ended.

    Args:
        check_running: raises if no engine can take them.
        send: sends a request to the engine.
        abort: aborts a sent request by its id, after it was forgotten here.
    """

    def __init__(
        self,
        *,
        check_running: Callable[[], None],
        send: Callable[[AddRequest], None],
        abort: Callable[[str], None],
    ) -> None:
        self._check_running = check_running
        self._send = send
        self._send_abort = abort
        self._unfinished: dict[str, Unfinished] = {}  # key: request id

    def __len__(self) -> int:
        return len(self._unfinished)

    def __iter__(self) -> Iterator[Unfinished]:
        """Iterate over a copy, in the order in which they came."""
        return iter(tuple(self._unfinished.values()))

    def get(self, request_id: str) -> Unfinished | None:
        """Return a request; None if it has ended."""
        return self._unfinished.get(request_id)

    @asynccontextmanager
    async def submitted(
        self, requests: Iterable[AddRequest], take: Take
    ) -> AsyncGenerator[Submission]:
        """See `Engine.submitted`."""
        submission = Submission(take)
        try:
            for request in requests:
                self._check_running()
                self._add(submission, request)
                await asyncio.sleep(0)  # each one copies the whole prompt
                if submission.ended.is_set():
                    break
            submission.close()
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

    def _add(self, submission: Submission, request: AddRequest) -> None:
        assert request.request_id not in self._unfinished, "ids are unique"
        index = submission.add(request.request_id)
        self._unfinished[request.request_id] = Unfinished(submission, index, request)
        self._send(request)

    def _take(self, one: Unfinished, output: RequestOutput, now_s: float) -> None:
        one.has_begun = True
        try:
            _raise_if_failed(output)
            if output.finish_reason is not None:
                self._forget(output.request_id, abort=False)
            if not one.submission.take(one.index, output, now_s):
                self._forget(output.request_id, abort=True)
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
