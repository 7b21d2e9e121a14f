import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.config import SchedulerConfig
from legato.core.errors import InvalidRequestError
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams, ThinkingLimit
from legato.core.slo import ServiceParams
from legato.core.stats import CacheInfo
from legato.core.structured_outputs import StructuredOutputs
from legato.engine.client.requests import build_requests, last_tokens, with_bad_words
from legato.engine.process.engine_messages import EngineInfo

INFO = EngineInfo(
    model="m",
    served_model_names=("m",),
    max_model_len=10,
    vocab_size=100,
    cache=CacheInfo(num_blocks=1, block_size=32, dtype="bfloat16", enable_prefix_caching=True),
    scheduler=SchedulerConfig().resolve(10),
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


LIMIT = ThinkingLimit(budget=1, begins=((1,),), ends=(2,), forced=(2,), forced_again=(100,))
_NONE_LEFT = "allowed_token_ids", None


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
        ([1], {"thinking_limit": LIMIT, "max_tokens": 1}, "thinking_limit", None),
        ([1] * 5, {"max_tokens": None, "min_tokens": 6}, "min_tokens", None),
        ([1], {"allowed_token_ids": [5, 100], "max_tokens": 1}, "allowed_token_ids", None),
        ([1], {"bad_words_token_ids": [[5, 100]], "max_tokens": 1}, "bad_words", None),
        ([1], {"structured_outputs": StructuredOutputs(regex="a")}, "structured_outputs", None),
        # All that is left to begin with would end it.
        ([1], {"allowed_token_ids": [2], "min_tokens": 1, "max_tokens": 1}, *_NONE_LEFT),
        (
            [1],
            {"allowed_token_ids": [5], "bad_words_token_ids": [[5]], "max_tokens": 1},
            *_NONE_LEFT,
        ),
    ],
)
def test_refusals(
    prompt: list[int], params: dict[str, object], param: str, code: str | None
) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        build(prompt, **params)
    assert (refusal.value.param, refusal.value.code) == (param, code)


def test_settings_that_leave_a_token_are_taken() -> None:
    ending = {"allowed_token_ids": [2], "max_tokens": 1}
    assert build([1], **ending)[0].params.allowed_token_ids == (2,)
    assert build([1], **ending, min_tokens=1, ignore_eos=True)
    assert build([1], allowed_token_ids=[5], bad_words_token_ids=[[5, 5]], max_tokens=1)


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=30),
    st.none() | st.just(-1) | st.integers(1, 10),
    st.none() | st.integers(1, 9),
)
def test_a_truncated_prompt_is_the_end_of_it_and_fits(
    prompt: list[int], kept: int | None, max_tokens: int | None
) -> None:
    params = SamplingParams(truncate_prompt_tokens=kept, max_tokens=max_tokens)
    left = last_tokens(prompt, params, INFO.max_model_len)
    assert left == prompt[len(prompt) - len(left) :]
    match kept:
        case None:
            assert left == prompt
        case -1:
            assert len(left) == min(len(prompt), INFO.max_model_len - (max_tokens or 1))
            assert build([*left], max_tokens=max_tokens)
        case _:
            assert len(left) == min(len(prompt), kept)


def test_no_more_is_kept_than_the_context_holds() -> None:
    params = SamplingParams(truncate_prompt_tokens=11)
    with pytest.raises(InvalidRequestError, match="context of 10 tokens") as refusal:
        last_tokens([1], params, INFO.max_model_len)
    assert refusal.value.param == "truncate_prompt_tokens"


def test_bad_words_are_spelled_at_the_beginning_and_inside() -> None:
    params = SamplingParams(bad_words=["ab", " c"], bad_words_token_ids=[[7]])
    spelled = with_bad_words(params, lambda text: [ord(char) for char in text])
    assert spelled.bad_words_token_ids == ((7,), (97, 98), (32, 97, 98), (99,), (32, 99))
    assert spelled.needs_values
    assert build([1], max_tokens=1)[0].params.bad_words == ()


@pytest.mark.parametrize(
    ("served", "asked", "is_called"),
    [
        ("m", "m", True),
        ("m", "m:latest", True),
        ("m:latest", "m", True),
        ("m:latest", "m:latest", True),
        ("m:8b", "m", False),
        ("m", "m:8b", False),
    ],
)
def test_a_name_without_a_tag_is_the_latest(served: str, asked: str, is_called: bool) -> None:
    info = msgspec.structs.replace(INFO, served_model_names=(served,))
    assert info.is_called(asked) is is_called
