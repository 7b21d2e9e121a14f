"""Given tokens in the place of sampled ones, as an executor's sequences and grammars take them."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from legato.core.plan import GivenTokens, ScheduledChunk, StepPlan
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.structured_outputs import StructuredOutputs
from legato.core.token_ids import token_array
from legato.executor.constraint import Constraint
from legato.executor.mask_maker import MaskMaker
from legato.executor.sequences import Sequences, StepOutcome
from legato.grammar.matcher import Grammar, compile_grammar
from legato.grammar.tokens import grammar_tokenizer
from legato.language.forms.source import grammar_source
from tests.executor.by_hand import EOS, VOCABULARY

_TOKENIZER = grammar_tokenizer(VOCABULARY)


def tokens_of(text: str) -> tuple[int, ...]:
    """One a character, as in `VOCABULARY`."""
    return tuple(ord(char) - ord("!") for char in text)


def grammar(regex: str) -> Grammar:
    form = StructuredOutputs(regex=regex)
    return compile_grammar(_TOKENIZER, grammar_source(form, ["<eos>"]))


def chunk(start: int, num_tokens: int, given: GivenTokens | None = None) -> ScheduledChunk:
    kind = "decode" if given is None else "prefill"
    return ScheduledChunk("a", start, num_tokens, (0,), 1, kind, given=given)


@pytest.mark.parametrize("regex", [None, "[A-Z]{1,20}"])
@pytest.mark.parametrize("num_repeated", [1, 2])
@pytest.mark.parametrize("late", ["Y", "YYY"])
def test_a_step_after_given_tokens_goes_on_from_them(
    regex: str | None, num_repeated: int, late: str
) -> None:
    """A failed step is begun again, with the same tokens."""
    sequences = Sequences(lambda _: grammar(regex or ""))
    form = None if regex is None else StructuredOutputs(grammar="start: /[A-Z]+/")
    message = AddRequest(
        request_id="a",
        prompt_token_ids=token_array(tokens_of("abc")),
        params=SamplingParams(max_tokens=9, seed=0, structured_outputs=form),
        eos_token_ids=(EOS,),
    )
    first = sequences.begin(StepPlan(step_id=0, chunks=(chunk(0, 3),), new_requests=(message,)))
    sequences.end(first, StepOutcome({"a": tokens_of("X")}, num_known_rows={"a": 1}), 0.0)
    for place in range(len(late)):  # what comes is too late
        later = sequences.begin(StepPlan(step_id=1, chunks=(chunk(3 + place, 1),)))
        sequences.end(later, StepOutcome({"a": tokens_of("Y")}, num_known_rows={"a": 1}), 0.0)
    given = GivenTokens(4, tokens_of("END"))
    for _ in range(num_repeated):
        step = sequences.begin(StepPlan(step_id=2, chunks=(chunk(3, 4, given),)))
    [sequence] = step.sequences
    assert tuple(sequence.token_ids[: sequence.num_tokens]) == tokens_of("abcXEND")
    if sequence.constraint is not None:
        assert sequence.constraint.fault is None
        assert sequence.constraint._num_consumed == len("XEND")


@pytest.mark.parametrize("sampled", ["AB", "ABCD"])
def test_a_grammar_goes_back_to_the_last_token_that_stays(sampled: str) -> None:
    """What was sampled after it, perhaps to the end of the form, is as if it had never been."""
    constraint = Constraint(grammar("A(BCD|xy)"), (EOS,))
    assert constraint.advance(tokens_of(sampled)) == len(sampled)
    constraint.give(1, tokens_of("x"))
    assert constraint.fault is None
    assert not constraint.is_complete
    constraint.advance(tokens_of("y"))
    assert constraint.fault is None
    assert constraint.is_complete


def test_given_tokens_that_a_grammar_forbids_end_the_request() -> None:
    constraint = Constraint(grammar("A(BCD|xy)"), (EOS,))
    constraint.advance(tokens_of("A"))
    constraint.give(1, tokens_of("z"))
    assert constraint.fault is not None


def held_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[MaskMaker, threading.Event, threading.Event]:
    """Return a mask maker, what its workers set as they make masks, and what lets them go on.

    Only its own are held: workers of earlier tests may still make masks.
    """
    begun, may_end = threading.Event(), threading.Event()
    maker = MaskMaker()
    compute = maker._compute

    def held(*args: Any) -> None:
        begun.set()
        assert may_end.wait(60)
        compute(*args)

    monkeypatch.setattr(maker, "_compute", held)
    return maker, begun, may_end


@pytest.mark.parametrize(
    "move",
    [
        lambda maker, constraint: maker.give(constraint, 1, tokens_of("x")),
        lambda maker, constraint: maker.advance(constraint, tokens_of("C")),
    ],
    ids=["given", "sampled"],
)
def test_a_grammar_stays_where_it_is_while_its_mask_is_made(
    monkeypatch: pytest.MonkeyPatch, move: Callable[[MaskMaker, Constraint], Any]
) -> None:
    """llguidance refuses to move a grammar that another thread reads."""
    maker, begun, may_end = held_masks(monkeypatch)
    constraint = Constraint(grammar("A(BCD|xy)"), (EOS,))
    constraint.advance(tokens_of("AB"))
    maker.want([(constraint, ())])
    assert begun.wait(60)
    moving = threading.Thread(target=move, args=(maker, constraint))
    moving.start()
    moving.join(0.1)
    assert moving.is_alive()
    assert constraint.place == 1
    may_end.set()
    moving.join(60)
    assert constraint.fault is None
    assert constraint.place == 2
    assert not len(constraint.masks), "a mask of the place that it left"


def test_a_request_that_ends_while_its_mask_is_made_stays_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    maker, begun, may_end = held_masks(monkeypatch)
    constraint = Constraint(grammar("A(BCD|xy)"), (EOS,))
    maker.want([(constraint, tokens_of("AB"))])
    assert begun.wait(60)
    maker.close(constraint)
    may_end.set()
    maker._quick.submit(lambda: None).result(60)
    assert constraint.has_ended
    assert not len(constraint.masks), "of drafts that no request has"


def test_masks_are_made_after_a_thread_that_could_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    maker, constraint = MaskMaker(), Constraint(grammar("AB"), (EOS,))

    def fail(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(maker._quick, "submit", fail)
        with pytest.raises(RuntimeError, match="start"):
            maker.want([(constraint, ())])
    maker.wait([constraint], 60, is_alone=False)
    assert constraint.num_known_rows == 1
