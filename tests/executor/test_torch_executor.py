"""Chunks in any order, against one pass over the whole sequence by the plain decoder in float32."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.core.outputs import TokenLogprobs
from tests.executor.backends import EXACT, NATIVE, QUANTIZED, ROUNDED, Backend, params
from tests.executor.by_hand import SPEC, Stream, prompt, run_by_hand
from tests.model.dense import packed_logits
from tests.model.random_models import random_decoder
from tests.profiles import examples

EVERYTHING = {"logprobs": 3, "prompt_logprobs": 2}

on_all_backends = pytest.mark.parametrize("backend", params([EXACT, ROUNDED, *NATIVE, *QUANTIZED]))


def assert_as_whole(stream: Stream, backend: Backend) -> None:
    """Each greedy token and all scores are those of one pass over what the stream became."""
    logits = packed_logits(random_decoder(SPEC, torch.float32), [stream.tokens])[0]
    expected, first = logits.log_softmax(-1), stream.num_prompt_tokens
    wanted = stream.message.params
    best = expected[first - 1 : -1].max(-1).values
    for position, token in enumerate(stream.output, start=first):
        assert expected[position - 1, token] >= best[position - first] - backend.tolerance
    if wanted.logprobs is not None:
        assert len(stream.logprobs) == len(stream.output)
        check(stream.logprobs, stream.output, expected[first - 1 :], wanted.logprobs, backend)
    if wanted.prompt_logprobs is not None:
        assert len(stream.prompt_logprobs) == first - 1
        known = stream.tokens[1:first]
        check(stream.prompt_logprobs, known, expected, wanted.prompt_logprobs, backend)


def check(
    entries: list[TokenLogprobs],
    tokens: list[int],
    expected: torch.Tensor,
    num_top: int,
    backend: Backend,
) -> None:
    """`expected` [at least as many as tokens, V]."""
    for entry, token, row in zip(entries, tokens, expected, strict=False):
        assert entry.token_id == token
        assert len(entry.top) == num_top
        for token_id, logprob in ((entry.token_id, entry.logprob), *entry.top):
            assert logprob == pytest.approx(float(row[token_id]), abs=backend.tolerance)


@on_all_backends
@pytest.mark.parametrize(
    "chunks", [[150], [1] * 5 + [145], [32, 32, 32, 54], [37, 1, 76, 36], [149, 1]], ids=str
)
def test_a_prompt_in_chunks(backend: Backend, chunks: list[int]) -> None:
    hand, _ = run_by_hand(backend)
    stream = hand.add("a", prompt(150), **EVERYTHING)
    for chunk in chunks:
        assert not stream.output
        hand.step(a=chunk)
    hand.finish()
    assert_as_whole(stream, backend)


def assert_pooled(stream: Stream, backend: Backend) -> None:
    """Its vector has the logits of the last token, or the mean of all: logits are linear."""
    plain = random_decoder(SPEC, torch.float32)
    logits = packed_logits(plain, [stream.tokens])[0]
    expected = logits.mean(0) if stream.message.pooling == "mean" else logits[-1]
    assert stream.pooled is not None
    vector = torch.frombuffer(bytearray(stream.pooled), dtype=torch.float32)
    with torch.inference_mode():
        found = plain.compute_logits(vector[None])[0]
    torch.testing.assert_close(found, expected, atol=backend.tolerance, rtol=0)
    assert not stream.output


@on_all_backends
def test_pooled_prompts_beside_decodes(backend: Backend) -> None:
    hand, _ = run_by_hand(backend)
    stream = hand.add("stream", prompt(20), **EVERYTHING)
    last = hand.add("last", prompt(70, salt=1), pooling="last")
    mean = hand.add("mean", prompt(60, salt=2), pooling="mean")
    hand.step(stream=20, mean=25)
    hand.step(stream=1, last=30, mean=10)
    hand.preempt("mean")
    hand.step(stream=1, last=39, mean=33)
    assert (last.pooled, mean.pooled) == (None, None)
    hand.step(stream=1, last=1, mean=26)
    assert mean.pooled is None
    hand.step(mean=1)
    hand.finish()
    assert_as_whole(stream, backend)
    assert_pooled(last, backend)
    assert_pooled(mean, backend)


@on_all_backends
def test_prompts_beside_decodes(backend: Backend) -> None:
    hand, _ = run_by_hand(backend)
    a, b, c = (
        hand.add("a", prompt(40), **EVERYTHING),
        hand.add("b", prompt(100, salt=1)),
        hand.add("c", prompt(1, salt=2), logprobs=5),
    )
    hand.step(a=40)
    hand.step(a=1, b=70)
    hand.step(b=3, c=1, a=1)
    hand.step(c=1, b=27)
    hand.finish()
    for stream in (a, b, c):
        assert len(stream.output) == 8
        assert_as_whole(stream, backend)


@on_all_backends
def test_computed_again_after_a_preemption(backend: Backend) -> None:
    """Scores of the prompt come once, be it preempted inside the prompt or behind it."""
    hand, _ = run_by_hand(backend)
    early = hand.add("early", prompt(90), **EVERYTHING)
    late = hand.add("late", prompt(70, salt=1), **EVERYTHING)
    hand.step(early=50, late=70)
    hand.step(late=1)
    hand.preempt("early")
    hand.preempt("late")
    hand.add("other", prompt(130, salt=2))
    hand.step(other=130, early=20, late=60)
    hand.finish()
    for stream in (early, late, hand.streams["other"]):
        assert_as_whole(stream, backend)


@on_all_backends
def test_swapped_to_the_host_and_back(backend: Backend) -> None:
    """Resume in other blocks, while another request writes to the former ones."""
    hand, _ = run_by_hand(backend)
    a = hand.add("a", prompt(80), **EVERYTHING)
    hand.step(a=80)
    hand.step(a=1)
    hand.swap_out("a")
    b = hand.add("b", prompt(200, salt=1))
    hand.step(b=200)
    hand.swap_in("a")
    hand.finish()
    assert_as_whole(a, backend)
    assert_as_whole(b, backend)


@on_all_backends
def test_a_failed_step_leaves_no_trace(backend: Backend) -> None:
    """It is run again in halves, as the engine does: same tokens, and each score once."""
    streams = []
    for fails in (False, True):
        hand, model = run_by_hand(backend)
        a = hand.add("a", prompt(40), temperature=1.0, seed=5, **EVERYTHING)
        b = hand.add("b", prompt(60, salt=1), **EVERYTHING)
        hand.step(a=30, b=10)
        for step in ({"a": 10, "b": 20}, {"a": 1, "b": 30}):
            if fails:
                model.fails = True
                with pytest.raises(RuntimeError, match="boom"):
                    hand.step(**step)
                model.fails = False
            for name, count in step.items():
                hand.step(**{name: count})
        hand.finish()
        streams.append((a.output, b.output))
        assert_as_whole(b, backend)
        assert (len(a.prompt_logprobs), len(a.logprobs)) == (39, 8)
    assert streams[0] == streams[1]


def test_a_request_that_ended_is_forgotten() -> None:
    """Its id may come again, for other tokens."""
    hand, _ = run_by_hand(EXACT)
    hand.add("a", prompt(40))
    hand.step(a=40)
    hand.end("a")
    other = hand.add("other", prompt(9))
    hand.step(other=9)
    hand.streams["a"] = Stream(other.message, prompt(40))
    with pytest.raises(KeyError):
        hand.step(a=40)
    again = hand.add("a", prompt(70, salt=3), **EVERYTHING)
    hand.finish()
    assert_as_whole(again, EXACT)


def test_out_of_memory_is_one_error_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, model = run_by_hand(EXACT)

    def too_much(_: torch.Tensor) -> torch.Tensor:
        return torch.empty(2**60)

    monkeypatch.setattr(model, "compute_logits", too_much)
    hand.add("a", prompt(5))
    with pytest.raises(MemoryError):
        hand.step(a=5)


@on_all_backends
@given(data=st.data())
@examples(15)
def test_any_schedule(backend: Backend, data: st.DataObject) -> None:
    """Streams of any lengths, in chunks of any size, preempted, swapped and failing at any time."""
    hand, model = run_by_hand(backend, seed=data.draw(st.integers(0, 99), "seed"))
    for i in range(data.draw(st.integers(1, 4), "streams")):
        length = data.draw(st.integers(1, 3) | st.integers(1, 130), "length")
        settings: dict[str, Any] = EVERYTHING if i % 2 == 0 else {}
        hand.add(str(i), prompt(length, salt=i), max_tokens=4, **settings)
    for _ in range(data.draw(st.integers(0, 12), "steps")):
        act = data.draw(st.sampled_from(["step", "step", "step", "preempt", "swap", "fail"]), "act")
        running = {name: s for name, s in hand.streams.items() if s.num_left}
        names = data.draw(st.sets(st.sampled_from(sorted(running)), min_size=1), "of")
        counts = {
            name: data.draw(
                st.integers(1, len(running[name].tokens) - running[name].num_computed), name
            )
            for name in sorted(names)
        }
        if act == "preempt":
            hand.preempt(min(names))
        elif act == "swap":
            hand.swap_out(min(names))
            hand.swap_in(min(names))
        else:
            if act == "fail":
                model.fails = True
                with pytest.raises(RuntimeError):
                    hand.step(**counts)
                model.fails = False
            hand.step(**counts)
        if not any(s.num_left for s in hand.streams.values()):
            break
    hand.finish()
    for stream in hand.streams.values():
        assert len(stream.output) == 4
        assert_as_whole(stream, backend)
