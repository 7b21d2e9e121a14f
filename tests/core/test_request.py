"""When a sampled token ends a request, and when its tokens are due."""

import math

import pytest

from legato.core.outputs import FinishReason
from legato.core.request import AddRequest, Request
from legato.core.sampling_params import SamplingParams
from legato.core.slo import SloClass
from legato.core.token_ids import token_array

EOS, STOP, OTHER = 2, 7, 5
STOP_REASONS = {EOS: None, STOP: STOP}


def request(max_model_len: int = 100, **params: object) -> Request:
    return Request(
        AddRequest(
            request_id="r",
            prompt_token_ids=token_array([1, 1, 1]),
            params=SamplingParams(stop_token_ids=(STOP,), **params),  # type: ignore[arg-type]
            eos_token_ids=(EOS,),
            arrival_time_s=5.0,
        ),
        SloClass(),
        max_model_len,
    )


def running(slo: SloClass, *, first_s: float, last_s: float, num_output_tokens: int) -> Request:
    """A request some of whose tokens came, the first and the last at the given times."""
    stream = Request(request(max_tokens=100).message, slo, 1000)
    for now_s in (first_s, *[last_s] * (num_output_tokens - 1)):
        stream.append(OTHER, now_s)
    return stream


@pytest.mark.parametrize("token_id", [EOS, STOP])
def test_ends_at_a_stop_token_but_not_before_min_tokens(token_id: int) -> None:
    early = request(min_tokens=2, max_tokens=9)
    early.append(token_id, 6.0)
    assert early.finish_reason is None
    early.append(token_id, 6.0)
    assert early.finish_reason is FinishReason.STOP
    assert early.stop_reason == STOP_REASONS[token_id]


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(2, 100), (9, 5)])
def test_ends_at_its_own_limit_or_the_models(max_tokens: int, max_model_len: int) -> None:
    limited = request(max_model_len, max_tokens=max_tokens)
    limited.append(OTHER, 6.0)
    assert limited.finish_reason is None
    limited.append(OTHER, 6.0)
    assert limited.finish_reason is FinishReason.LENGTH
    assert limited.num_output_tokens == 2


def test_nothing_is_due_before_the_first_token_but_that_one() -> None:
    waiting = Request(request().message, SloClass(itl_s=0.1, tpot_s=0.1, ttft_s=2.0), 100)
    assert waiting.token_due_s == math.inf
    assert waiting.ttft_deadline_s == 7.0
    assert Request(request().message, SloClass(itl_s=0.1), 100).ttft_deadline_s is None


@pytest.mark.parametrize("slo", [SloClass(), SloClass(ttft_s=2.0)])
def test_nothing_is_due_to_a_stream_without_a_pace(slo: SloClass) -> None:
    assert running(slo, first_s=6.0, last_s=6.5, num_output_tokens=3).token_due_s == math.inf


def test_an_itl_counts_from_the_last_token() -> None:
    slo = SloClass(itl_s=0.25)
    assert running(slo, first_s=6.0, last_s=8.0, num_output_tokens=3).token_due_s == 8.25


def test_a_pace_gives_slack_to_a_stream_that_is_ahead() -> None:
    """Three tokens by 6.5, where one second a token was promised: the fourth is due at 9."""
    slo = SloClass(tpot_s=1.0)
    assert running(slo, first_s=6.0, last_s=6.5, num_output_tokens=3).token_due_s == 9.0


def test_a_pace_does_not_ask_a_stream_that_is_behind_to_catch_up() -> None:
    slo = SloClass(tpot_s=1.0)
    assert running(slo, first_s=6.0, last_s=20.0, num_output_tokens=3).token_due_s == 21.0


@pytest.mark.parametrize(
    ("itl_s", "last_s", "due_s"),
    [
        pytest.param(4.0, 6.5, 9.0, id="the pace, where the ITL leaves more"),
        pytest.param(2.0, 6.5, 8.5, id="the ITL, where the pace leaves more"),
        pytest.param(0.5, 20.0, 20.5, id="the ITL, behind the pace"),
    ],
)
def test_of_both_promises_the_earlier_holds(itl_s: float, last_s: float, due_s: float) -> None:
    slo = SloClass(itl_s=itl_s, tpot_s=1.0)
    assert running(slo, first_s=6.0, last_s=last_s, num_output_tokens=3).token_due_s == due_s


def test_without_its_promise_a_request_is_best_effort() -> None:
    stream = running(SloClass(itl_s=0.5), first_s=6.0, last_s=8.0, num_output_tokens=3)
    assert not stream.is_best_effort
    stream.give_up_promise()
    assert stream.is_best_effort
    assert stream.token_due_s == math.inf
    assert stream.ttft_deadline_s is None
