"""A draft model guesses what it would say itself, after any wrong guesses."""

import logging
import math
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.core.request import AddRequest, Request
from legato.core.sampling_params import SamplingParams
from legato.core.slo import SloClass
from legato.core.token_ids import token_array
from legato.executor.draft_model import DraftModel
from legato.executor.simulated import VirtualClock
from legato.model.model import LayerWatch, Model, StepAttention
from legato.model.states import StepStates
from legato.speculation.drafter import Draft
from tests.executor.backends import BLOCK_SIZE, EXACT, NATIVE, Backend, params
from tests.executor.by_hand import SPEC, FailingModel, prompt
from tests.model.random_models import VOCAB_SIZE
from tests.profiles import examples

MAX_LEN = 330
NUM_BLOCKS = 24
PASS_S, ROW_S = 0.010, 0.001
NUM_TOKENS = 12

on_backends = pytest.mark.parametrize("backend", params([EXACT, *NATIVE]))


class TimedModel(FailingModel):
    """One whose passes take virtual time. Attributes: num_rows: of each pass."""

    def __init__(self, model: Model, clock: VirtualClock) -> None:
        super().__init__(model)
        self._clock = clock
        self.num_rows: list[int] = []
        self.is_nan = False

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        *,
        states: StepStates | None = None,
        num_layers: int | None = None,
        watch: LayerWatch | None = None,
    ) -> torch.Tensor:
        self.num_rows.append(len(input_ids))
        self._clock.advance_to(self._clock.now_s + PASS_S + ROW_S * len(input_ids))
        return super().forward(
            input_ids, positions, attention, states=states, num_layers=num_layers, watch=watch
        )

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden)
        return logits * torch.nan if self.is_nan else logits


def drafter(
    backend: Backend = EXACT, num_blocks: int = NUM_BLOCKS, max_len: int = MAX_LEN
) -> tuple[DraftModel, TimedModel]:
    model, attention = backend.make(SPEC, num_blocks)
    clock = VirtualClock()
    timed = TimedModel(model, clock)
    draft_model = DraftModel(
        timed,
        attention,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        max_len=max_len,
        clock=clock,
    )
    timed.num_rows.clear()
    return draft_model, timed


def request(name: str, tokens: Sequence[int], max_tokens: int = 100) -> Request:
    message = AddRequest(
        request_id=name,
        prompt_token_ids=token_array(tokens),
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
    )
    return Request(message, SloClass(), 10_000)


def draft(
    model: DraftModel, *requests: Request, count: int = NUM_TOKENS, within_s: float = math.inf
) -> list[Draft | None]:
    counts = [count] * len(requests)
    return list(model.draft(requests, counts, token_s=math.inf, within_s=within_s).drafts)


def guesses(model: DraftModel, one: Request, count: int = NUM_TOKENS) -> list[int]:
    [drafted] = draft(model, one, count=count)
    assert drafted is not None
    return list(drafted.token_ids)


@cache
def fresh_drafter(backend: Backend) -> DraftModel:
    return drafter(backend)[0]


@cache
def worn_drafter(backend: Backend) -> DraftModel:
    return drafter(backend)[0]


def afresh(backend: Backend, tokens: Sequence[int], count: int = NUM_TOKENS) -> list[int]:
    """What a draft model guesses that has all tokens as its prompt, one guess at a time."""
    model = fresh_drafter(backend)
    found = list(tokens)
    for _ in range(count):
        one = request("afresh", found)
        found += guesses(model, one, 1)
        model.forget(one)
    return found[len(tokens) :]


def come(model: DraftModel, one: Request, tokens: Sequence[int]) -> None:
    for token in tokens:
        one.append(token, 0.0)
    model.advance(one)


@on_backends
@given(data=st.data())
@examples(8)
def test_it_guesses_as_if_it_had_never_guessed_wrong(backend: Backend, data: st.DataObject) -> None:
    model = worn_drafter(backend)
    one = request("one", prompt(30))
    for _ in range(data.draw(st.integers(1, 5), "steps")):
        guessed = guesses(model, one, data.draw(st.integers(1, 6), "count"))
        num_right = data.draw(st.integers(0, len(guessed)), "right")
        others = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=3))
        come(model, one, guessed[:num_right] + others)
    assert guesses(model, one, 4) == afresh(backend, one.token_ids, 4)
    model.forget(one)


@on_backends
def test_a_prompt_in_slices_that_end_in_time(backend: Backend) -> None:
    model, timed = drafter(backend)
    long = request("long", prompt(300))
    within_s = PASS_S + 128.5 * ROW_S
    assert model.num_missing(long) == 300
    for num_left in (172, 44, 1):
        taken_s = model.catch_up([long], within_s)
        assert taken_s <= within_s
        assert model.num_missing(long) == num_left
    assert len(timed.num_rows) == 3
    assert guesses(model, long, 3) == afresh(backend, long.token_ids, 3)


def test_what_there_is_no_time_for_is_not_begun() -> None:
    model, timed = drafter()
    long = request("long", prompt(300))
    assert model.catch_up([long], 0.5 * PASS_S) == 0.0
    [drafted] = draft(model, request("short", prompt(5)), within_s=2.5 * PASS_S)
    assert drafted is not None
    assert len(drafted.token_ids) == 1
    assert timed.num_rows == [5]


def test_several_prompts_share_a_pass() -> None:
    model, timed = drafter()
    some = [request(f"{i}", prompt(20, i)) for i in range(4)]
    model.catch_up(some, PASS_S + 48.5 * ROW_S)
    assert timed.num_rows == [48]
    assert [model.num_missing(one) for one in some] == [1, 1, 10, 20]


def test_requests_side_by_side() -> None:
    model, timed = drafter()
    some = [request(f"{i}", prompt(9 + i, i)) for i in range(5)]
    drafted = draft(model, *some, count=6)
    assert [list(one.token_ids) for one in drafted if one] == [
        afresh(EXACT, one.token_ids, 6) for one in some
    ]
    assert timed.num_rows[1:] == [5] * 5


def test_guesses_end_where_they_cost_more_than_they_bring() -> None:
    model, timed = drafter()
    one = request("one", prompt(9))
    [drafted] = model.draft([one], [8], token_s=0.0, within_s=math.inf).drafts
    assert drafted is not None
    assert len(timed.num_rows) == len(drafted.token_ids) == 1


def test_chances_follow_what_comes() -> None:
    model, _ = drafter()
    right, wrong = request("right", prompt(9), 800), request("wrong", prompt(9, 1), 800)
    for _ in range(20):
        come(model, right, guesses(model, right, 4))
        come(model, wrong, [(guesses(model, wrong, 4)[0] + 1) % VOCAB_SIZE])
    chances = {one.request_id: model.outlook(one, 4) for one in (right, wrong)}
    assert chances["right"][0] > 2 * chances["wrong"][0]
    assert len(chances["right"]) == 4
    [drafted, other] = draft(model, right, wrong, count=2)
    assert drafted is not None
    assert other is not None
    assert drafted.chances[0] > other.chances[0]
    for _ in range(250):
        come(model, wrong, [1])  # without a guess
    assert model.outlook(wrong, 1)[0] > 1.3 * chances["wrong"][0]


def test_a_model_that_is_always_wrong_is_tried_again_some_day() -> None:
    model, _ = drafter()
    one = request("one", prompt(9), 10_000)
    for _ in range(80):
        come(model, one, [(guesses(model, one, 1)[0] + 1) % VOCAB_SIZE])
    believed = model.outlook(request("another", prompt(5)), 1)[0]
    assert believed < 0.1
    for _ in range(2000):
        model.skip_step()
    assert model.outlook(request("another", prompt(5)), 1)[0] > 0.5


def test_a_cache_that_is_full() -> None:
    """A request without room is not drafted for, and has room again when another has ended."""
    model, _ = drafter(num_blocks=4, max_len=200)
    first, second = request("first", prompt(70)), request("second", prompt(60, 1))
    expected = guesses(model, first, 3)
    assert model.outlook(second, 3) == ()
    assert draft(model, first, second, count=3)[1] is None
    model.catch_up([second], 1.0)
    assert guesses(model, first, 3) == expected
    model.forget(first)
    assert len(model.outlook(second, 3)) == 3
    assert guesses(model, second, 3) == afresh(EXACT, second.token_ids, 3)
    model.forget(second)
    assert len(model.outlook(request("third", prompt(120, 2)), 3)) == 3


def test_positions_end_where_the_models_do() -> None:
    model, _ = drafter(max_len=40)
    assert len(model.outlook(request("short", prompt(38)), 6)) == 2
    assert model.outlook(request("long", prompt(40)), 6) == ()
    assert model.outlook(request("longer", prompt(400)), 6) == ()


@pytest.mark.parametrize("fault", ["raises", "computes NaN"])
def test_a_broken_one_says_so_once_and_guesses_nothing(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, timed = drafter()
    one, other = request("one", prompt(9)), request("other", prompt(70))
    assert guesses(model, one, 3)
    timed.fails, timed.is_nan = fault == "raises", fault != "raises"
    with caplog.at_level(logging.ERROR):
        assert draft(model, one, other) == [None, None]
        timed.fails = timed.is_nan = False
        assert draft(model, one, other) == [None, None]
        assert model.catch_up([other], 1.0) == 0.0
    assert [record.getMessage() for record in caplog.records] == [
        "the draft model failed, and drafts nothing any more"
    ]
    assert model.outlook(one, 3) == ()
    come(model, one, [1, 2])
    model.forget(one)
    model.forget(other)
