"""The executor with its kernels, by plans made by hand, against one pass in PyTorch."""

import pytest
import torch

from legato import StructuredOutputs
from legato.model.spec import DecoderSpec
from tests.executor.backends import BLOCK_SIZE, EXACT
from tests.executor.by_hand import SPEC, ByHand, prompt, text_of
from tests.executor.test_torch_executor import EVERYTHING, assert_as_whole, assert_pooled
from tests.gpu.executors import make_executor
from tests.gpu.host_copies import OnlyAsynchronousCopies
from tests.gpu.host_twin import HostTwin, no_launches, on_the_twin
from tests.model.dense import packed_logits
from tests.model.random_models import EXPERTS, SPECS, decoder_spec, random_decoder

BLOCKS = {"block_size": BLOCK_SIZE, "num_blocks": 6, "max_len": 128}


def test_chunks_scores_swaps_drafts_and_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = random_decoder(SPEC, torch.float32)
    executor, program = make_executor(plain, **BLOCKS, host_sizes=[4])
    hand = ByHand(executor, range(6))
    long = hand.add("long", prompt(36), max_tokens=3, **EVERYTHING)
    short = hand.add("short", prompt(3, salt=1), max_tokens=5)
    hand.step(long=20)
    hand.swap_out("long")
    hand.step(short=3)
    hand.swap_in("long")
    with monkeypatch.context() as patch:
        patch.setattr(program, "sample", boom)
        with pytest.raises(RuntimeError, match="boom"):
            hand.step(long=16, short=1)
    hand.step(long=16, short=1)
    hand.step({"short": [short.output[-1], 5]}, short=1)
    hand.finish()
    for stream in (long, short):
        assert_as_whole(stream, EXACT)
    assert (len(long.output), len(long.prompt_logprobs), len(short.output)) == (3, 35, 5)


def test_pooled_prompts() -> None:
    executor, _ = make_executor(random_decoder(SPEC, torch.float32), **BLOCKS)
    hand = ByHand(executor, range(6))
    stream = hand.add("stream", prompt(3), max_tokens=3)
    last = hand.add("last", prompt(20, salt=1), pooling="last")
    mean = hand.add("mean", prompt(17, salt=2), pooling="mean")
    hand.step(stream=3, mean=9)
    hand.step(stream=1, mean=8, last=19)
    hand.step(last=1)
    hand.finish()
    assert_as_whole(stream, EXACT)
    assert_pooled(last, EXACT)
    assert_pooled(mean, EXACT)


def boom(*_: object, **__: object) -> None:
    raise RuntimeError("boom")


def test_what_a_grammar_lets_come() -> None:
    executor, _ = make_executor(
        random_decoder(SPEC, torch.float32), **BLOCKS, grammar=lambda name: hand.grammar(name)
    )
    hand = ByHand(executor, range(6))
    form = StructuredOutputs(regex="[a-c]{3}")
    stream = hand.add("it", prompt(3), structured_outputs=form, temperature=1.0, seed=4)
    free = hand.add("free", prompt(2, salt=1), max_tokens=3)
    hand.finish()
    assert len(text_of(stream)) == 3
    assert set(text_of(stream)) <= set("abc")
    assert stream.is_complete
    assert_as_whole(free, EXACT)


@on_the_twin
@pytest.mark.parametrize(
    "spec", [SPEC, EXPERTS["limited gates, biases, sinks"]], ids=["", "experts"]
)
def test_asking_for_a_step_looks_at_no_value_and_waits_for_no_copy(
    spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device without values any look would raise; on a GPU it would wait."""
    no_launches(monkeypatch)
    plain, twin = random_decoder(spec, torch.float32), HostTwin("meta")
    executor, program = make_executor(
        plain, **BLOCKS, device=twin, host_sizes=[4], grammar=lambda name: hand.grammar(name)
    )
    monkeypatch.setattr(executor, "collect", lambda: boom())
    hand = ByHand(executor, range(6))
    form = StructuredOutputs(regex="[a-c]{3}")
    hand.add("scored", prompt(40), temperature=1.0, **EVERYTHING)
    hand.add("biased", prompt(3), logit_bias={3: 1.0}, frequency_penalty=1.0, min_tokens=2)
    hand.add("formed", prompt(2, salt=1), structured_outputs=form)
    hand.add("limited", prompt(2, salt=2), allowed_token_ids=(1, 2), repetition_penalty=1.1)
    everyone = {"scored": 40, "biased": 3, "formed": 2, "limited": 2}
    for step in (everyone, {"scored": 40}):
        with pytest.raises(RuntimeError, match="boom"), OnlyAsynchronousCopies(twin):
            hand.step(**step)
    assert program.sampled.is_meta


@on_the_twin
def test_copies_that_the_host_waits_for_are_found_out() -> None:
    twin = HostTwin("meta")
    there, pageable = torch.empty(4, device="meta"), torch.zeros(4)
    pinned = twin.host_tensor(4, dtype=torch.float32)
    with OnlyAsynchronousCopies(twin):
        there.copy_(pinned, non_blocking=True)
        with pytest.raises(AssertionError, match="makes the host wait"):
            there.copy_(pinned)
        with pytest.raises(AssertionError, match="pageable"):
            there.copy_(pageable, non_blocking=True)
        with pytest.raises(AssertionError, match="makes the host wait"):
            pageable.to("meta")


@on_the_twin
def test_scores_of_many_streams_are_a_few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five for all that is scored, and one for the tokens."""
    num_copies: list[int] = []
    download = HostTwin.download

    def counted(self: HostTwin, values: torch.Tensor) -> torch.Tensor:
        num_copies[-1] += 1
        return download(self, values)

    executor, _ = make_executor(random_decoder(SPEC, torch.float32), **BLOCKS)
    monkeypatch.setattr(HostTwin, "download", counted)
    hand = ByHand(executor, range(6))
    streams = [hand.add(f"{i}", prompt(3, salt=i), logprobs=i, max_tokens=2) for i in range(4)]
    for step in (dict.fromkeys("0123", 3), dict.fromkeys("0123", 1)):
        num_copies.append(0)
        hand.step(**step)
    assert num_copies == [6, 6]
    for stream in streams:
        assert_as_whole(stream, EXACT)


LAYERS = {
    "norms of whole rows": decoder_spec(qk_norm="whole"),
    **{
        name: SPECS[name]
        for name in (
            "norms after, of whole rows",
            "norms around, capped",
            "heads normed after rope",
        )
    },
    "both after one norm": decoder_spec(order="parallel", norm="layer", gate_scale=1.3),
    "each after its norm, no gates": decoder_spec(
        order="parallel_two", norm="layer", norm_bias=True, activation="gelu", is_gated=False
    ),
    "experts with gelu": EXPERTS["a shared expert with a gate"],
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_their_own(name: str) -> None:
    plain = random_decoder(LAYERS[name], torch.float32)
    hand = ByHand(make_executor(plain, **BLOCKS)[0], range(6))
    stream = hand.add("it", prompt(40), max_tokens=3)
    hand.step(it=20)
    hand.finish()
    likeliest = packed_logits(plain, [stream.tokens])[0].argmax(-1)
    assert stream.output == likeliest[39:-1].tolist()
