import pytest

from legato.core.config import SchedulerConfig
from legato.core.errors import InvalidRequestError
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.stats import CacheInfo
from legato.engine.frontend.requests import build_requests
from legato.engine.process.messages import EngineInfo

INFO = EngineInfo(
    model="m",
    served_model_name="m",
    max_model_len=10,
    vocab_size=100,
    cache=CacheInfo(num_blocks=1, block_size=32, dtype="bfloat16", enable_prefix_caching=True),
    slo_classes=SchedulerConfig().classes,
    settings={},
)


def build(prompt: list[int], **params: object) -> list[AddRequest]:
    return build_requests(
        prompt,
        SamplingParams(**params),  # type: ignore[arg-type]
        service=ServiceParams(),
        request_id="r",
        info=INFO,
        eos_token_ids=(2,),
        arrival_time_s=1.5,
    )


def test_what_was_left_open_is_decided() -> None:
    (request,) = build([1, 2, 3], max_tokens=None)
    assert request.params.max_tokens == 7
    assert request.params.seed is not None
    assert request.eos_token_ids == (2,)
    assert build([1], max_tokens=4, ignore_eos=True)[0].eos_token_ids == ()
    assert build([1], max_tokens=4)[0].params.seed != build([1], max_tokens=4)[0].params.seed


def test_completions_differ_in_seed_and_only_the_first_scores_the_prompt() -> None:
    requests = build([1], n=3, seed=7, max_tokens=4, prompt_logprobs=1)
    assert [r.request_id for r in requests] == ["r-0", "r-1", "r-2"]
    assert all(r.params.n == 1 for r in requests)
    assert requests[0].params.seed == 7
    assert len({r.params.seed for r in requests}) == 3
    assert [r.params.seed for r in requests] == [
        r.params.seed for r in build([1], n=3, seed=7, max_tokens=4)
    ]
    assert [r.params.prompt_logprobs for r in requests] == [1, None, None]


@pytest.mark.parametrize(
    ("prompt", "params", "param", "code"),
    [
        ([], {}, "prompt", None),
        ([100], {}, "prompt", None),
        ([-1], {}, "prompt", None),
        ([1] * 10, {"max_tokens": 1}, "prompt", "context_length_exceeded"),
        ([1] * 10, {"max_tokens": None}, "prompt", "context_length_exceeded"),
        ([1] * 9, {"max_tokens": 2}, "max_tokens", "context_length_exceeded"),
        ([1], {"logit_bias": {100: 1.0}, "max_tokens": 1}, "logit_bias", None),
        ([1], {"stop_token_ids": (100,), "max_tokens": 1}, "stop_token_ids", None),
        ([1] * 5, {"max_tokens": None, "min_tokens": 6}, "min_tokens", None),
    ],
)
def test_refusals(
    prompt: list[int], params: dict[str, object], param: str, code: str | None
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        build(prompt, **params)
    assert (refusal.value.param, refusal.value.code) == (param, code)
