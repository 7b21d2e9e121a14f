"""When a sampled token ends a request."""

import pytest

from legato.core.outputs import FinishReason
from legato.core.request import AddRequest, Request
from legato.core.sampling_params import SamplingParams

EOS, STOP, OTHER = 2, 7, 5
STOP_REASONS = {EOS: None, STOP: STOP}


def request(**params: object) -> Request:
    return Request(
        AddRequest(
            request_id="r",
            prompt_token_ids=(1, 1, 1),
            params=SamplingParams(stop_token_ids=(STOP,), **params),  # type: ignore[arg-type]
            eos_token_ids=(EOS,),
        )
    )


@pytest.mark.parametrize("token_id", [EOS, STOP])
def test_ends_at_a_stop_token_but_not_before_min_tokens(token_id: int) -> None:
    early = request(min_tokens=2, max_tokens=9)
    early.append(token_id, max_model_len=100)
    assert early.finish_reason is None
    early.append(token_id, max_model_len=100)
    assert early.finish_reason is FinishReason.STOP
    assert early.stop_reason == STOP_REASONS[token_id]


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(2, 100), (9, 5)])
def test_ends_at_its_own_limit_or_the_models(max_tokens: int, max_model_len: int) -> None:
    limited = request(max_tokens=max_tokens)
    limited.append(OTHER, max_model_len)
    assert limited.finish_reason is None
    limited.append(OTHER, max_model_len)
    assert limited.finish_reason is FinishReason.LENGTH
    assert limited.num_output_tokens == 2
