"""Detokenization and stop strings, on the real tokenizer."""

from collections.abc import Iterable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL
from legato.core.outputs import FinishReason, RequestOutput, TokenLogprobs
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.language.completion import Completion, CompletionDelta, CompletionStream
from legato.language.message.message_syntax import Marks, MessageSyntax
from legato.language.tokenizer.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(resolve_source(DEFAULT_MODEL))
EOS = 2


def new_stream(**params: object) -> CompletionStream:
    request = AddRequest(
        request_id="r",
        prompt_token_ids=token_array([1]),
        params=SamplingParams(**params),  # type: ignore[arg-type]
        eos_token_ids=(EOS,),
    )
    return CompletionStream(0, request, TOKENIZER.vocabulary)


def outputs(token_ids: list[int], reason: FinishReason) -> Iterable[RequestOutput]:
    last = len(token_ids) - 1
    for i, token_id in enumerate(token_ids):
        yield RequestOutput(
            request_id="r",
            new_token_ids=(token_id,),
            finish_reason=reason if i == last else None,
            logprobs=(TokenLogprobs(token_id, -1.0, 1, ()),),
        )


def run(
    token_ids: list[int], reason: FinishReason = FinishReason.LENGTH, **params: object
) -> tuple[Completion, list[CompletionDelta], CompletionStream]:
    stream = new_stream(**params)
    completion, deltas = Completion(0), []
    for output in outputs(token_ids, reason):
        deltas.append(stream.push(output))
        completion.add(deltas[-1])
        if completion.finish_reason is not None:
            break
    return completion, deltas, stream


@given(st.text(max_size=40))
def test_text_survives_and_no_character_is_torn(text: str) -> None:
    token_ids = TOKENIZER.encode(text)
    assume(token_ids and TOKENIZER.decode(token_ids) == text)  # its vocabulary lacks some bytes
    completion, _, _ = run(token_ids)
    assert completion.text == text


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), min_size=1, max_size=30))
def test_any_tokens_decode_as_the_tokenizer_does(token_ids: list[int]) -> None:
    completion, _, _ = run(token_ids)
    whole = TOKENIZER.decode(token_ids)
    # A character that the last token leaves unfinished is not given out.
    assert completion.text in (whole, whole.removesuffix("�"))


def test_an_emoji_comes_whole() -> None:
    token_ids = TOKENIZER.encode("🦔")
    assert len(token_ids) > 1
    _, deltas, _ = run(token_ids)
    assert [delta.text for delta in deltas] == [""] * (len(token_ids) - 1) + ["🦔"]


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    token_ids = [*TOKENIZER.encode("Hi"), EOS]
    assert run(token_ids)[0].text == "Hi"
    assert run(token_ids, skip_special_tokens=False)[0].text == "Hi<|im_end|>"


def test_some_special_tokens_may_be_kept() -> None:
    begin, end = 1, EOS
    token_ids = [begin, *TOKENIZER.encode("Hi"), end]
    assert run(token_ids, kept_special_tokens=(begin,))[0].text == "<|im_start|>Hi"
    marks = MessageSyntax(reasoning=Marks("a <|im_start|>", "Hi"))
    assert TOKENIZER.special_marks(marks) == {"<|im_start|>": begin}


def test_the_token_that_stops_is_no_text() -> None:
    token_ids = TOKENIZER.encode("one two")
    ends = {"stop_token_ids": token_ids[-1:]}
    assert run(token_ids, FinishReason.STOP, **ends)[0].text == "one"
    completion = run(token_ids, FinishReason.STOP, include_stop_str_in_output=True, **ends)[0]
    assert completion.text == "one two"
    assert completion.token_ids == token_ids


def test_the_last_token_that_a_grammar_allows_is_text() -> None:
    assert run(TOKENIZER.encode("one two"), FinishReason.STOP)[0].text == "one two"


def test_a_stop_string_ends_the_completion_and_asks_for_an_abort() -> None:
    token_ids = TOKENIZER.encode("one two three four")
    completion, _, stream = run(token_ids, stop=("o thr",))
    assert completion.text == "one tw"
    assert completion.finish_reason is FinishReason.STOP
    assert completion.stop_reason == "o thr"
    assert completion.token_ids == token_ids[:3]
    assert stream.needs_abort


def test_tokens_after_a_stop_string_in_the_same_step_are_left_out() -> None:
    token_ids = TOKENIZER.encode("one two three four")
    stream = new_stream(stop=("two",), include_stop_str_in_output=True)
    logprobs = tuple(TokenLogprobs(t, -1.0, 1, ()) for t in token_ids)
    delta = stream.push(
        RequestOutput(request_id="r", new_token_ids=tuple(token_ids), logprobs=logprobs)
    )
    assert delta.text == "one two"
    assert delta.token_ids == tuple(token_ids[:2])
    assert delta.logprobs == logprobs[:2]
    assert stream.needs_abort


def test_a_request_that_ended_needs_no_abort() -> None:
    completion, _, stream = run(TOKENIZER.encode("one two"), stop=("two",))
    assert completion.finish_reason is FinishReason.STOP
    assert not stream.needs_abort


def test_held_text_comes_out_at_the_end() -> None:
    completion, _, _ = run(TOKENIZER.encode("one two"), stop=("two three",))
    assert completion.text == "one two"
    assert completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("min_tokens", "text"), [(1, "a "), (2, "a b a "), (3, "a b a ")])
def test_stop_strings_are_not_looked_for_before_min_tokens(min_tokens: int, text: str) -> None:
    """Tokens: "a", " b", " a", " b", " c"."""
    completion, _, _ = run(TOKENIZER.encode("a b a b c"), stop=("b",), min_tokens=min_tokens)
    assert completion.text == text
