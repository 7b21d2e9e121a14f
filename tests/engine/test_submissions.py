"""Requests submitted together: when they have ended, and which of them are aborted."""

from collections.abc import Iterator

import pytest

from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.engine.client.submissions import Submissions


class Sent:
    """What an engine would be sent. Attributes: requests, aborts: ids, in order."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.aborts: list[str] = []
        self.submissions = Submissions(
            check_running=lambda: None,
            send=lambda request: self.requests.append(request.request_id),
            abort=self.aborts.append,
        )

    def give(self, request_id: str, finish_reason: FinishReason | None = None) -> None:
        output = RequestOutput(
            request_id=request_id, new_token_ids=(1,), finish_reason=finish_reason
        )
        self.submissions.take([output], 0.0)


def requests(*request_ids: str) -> Iterator[AddRequest]:
    for request_id in request_ids:
        yield AddRequest(
            request_id=request_id, prompt_token_ids=token_array([1]), params=SamplingParams()
        )


async def test_a_caller_that_wants_no_more_has_its_request_aborted() -> None:
    sent = Sent()
    taken: list[int] = []

    def take(index: int, _output: RequestOutput, _received_s: float) -> bool:
        taken.append(index)
        return index == 0

    async with sent.submissions.submitted(requests("a", "b"), take) as submission:
        assert sent.requests == ["a", "b"]
        sent.give("b")
        sent.give("b")  # it comes too late
        assert (sent.aborts, taken) == (["b"], [1])
        assert submission.begun.is_set()
        assert not submission.ended.is_set()
        sent.give("a", FinishReason.LENGTH)
        assert submission.ended.is_set()
    assert sent.aborts == ["b"], "the engine has ended the other itself"


async def test_a_submission_ends_after_its_last_request_was_sent() -> None:
    sent = Sent()

    def ending_early() -> Iterator[AddRequest]:
        yield from requests("a")
        sent.give("a", FinishReason.LENGTH)
        yield from requests("b")

    async with sent.submissions.submitted(ending_early(), lambda *_: True) as submission:
        assert not submission.ended.is_set()
        sent.give("b", FinishReason.LENGTH)
        assert submission.ended.is_set()


async def test_an_error_ends_a_submission_and_no_other() -> None:
    sent = Sent()

    def fail(_index: int, _output: RequestOutput, _received_s: float) -> bool:
        raise RuntimeError("no more")

    async with (
        sent.submissions.submitted(requests("a", "b"), fail) as failing,
        sent.submissions.submitted(requests("c"), lambda *_: True) as other,
    ):
        sent.give("a")
        assert failing.ended.is_set()
        with pytest.raises(RuntimeError, match="no more"):
            failing.check()
        assert sorted(sent.aborts) == ["a", "b"]
        sent.give("c", FinishReason.LENGTH)
        assert other.ended.is_set()
        other.check()
    assert len(sent.submissions) == 0


async def test_a_request_that_cannot_be_made_takes_those_before_it_along() -> None:
    sent = Sent()

    def failing() -> Iterator[AddRequest]:
        yield from requests("a")
        raise ValueError("a bad prompt")

    with pytest.raises(ValueError, match="a bad prompt"):
        async with sent.submissions.submitted(failing(), lambda *_: True):
            pytest.fail("it cannot be submitted")
    assert (sent.requests, sent.aborts) == (["a"], ["a"])
