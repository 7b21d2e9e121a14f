"""Experts in native layers, in plain weights and in codes."""

import pytest
import torch

from legato.core.plan import ScheduledChunk
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.executor.attention.native_backend import NativeAttentionBackend
from legato.executor.sequence import SequenceState
from legato.model.native import NativeKernels, NativeModel
from legato.model.quantization import QuantizedWeight, plain, quantize
from tests.executor.instructions import TESTED
from tests.executor.test_native import BLOCK_SIZE, Runner, computed, pytestmark
from tests.families.test_native import assert_most_rows_as_exact
from tests.model.random_models import EXPERTS, VOCAB_SIZE, native_model, random_decoder

__all__ = ["pytestmark"]

PROMPTS = [[150, 1, 1], [3, 33, 9], [1, 1, 64], [40]]
"""Chunks of four requests: some experts compute no row of a step, some one, some many."""


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("name", EXPERTS)
def test_as_exact_as_the_python_layers(name: str, instructions: str) -> None:
    native, rounded, exact = (
        torch.cat(runner.logits)
        for runner in computed(EXPERTS[name], PROMPTS, NativeKernels(3, instructions), seed=1)
    )
    largest = float(exact.abs().max())
    assert_most_rows_as_exact((native - exact).abs(), (rounded - exact).abs(), largest)


def logits_in_chunks(model: NativeModel, chunks: list[int]) -> torch.Tensor:
    backend = NativeAttentionBackend(model, model.cache, num_blocks=3, block_size=BLOCK_SIZE)
    runner = Runner(model, backend)
    tokens = token_array((3 * j * j + j) % VOCAB_SIZE for j in range(sum(chunks)))
    message = AddRequest(
        request_id="0", prompt_token_ids=tokens, params=SamplingParams(max_tokens=1)
    )
    for i, count in enumerate(chunks):
        chunk = ScheduledChunk("0", sum(chunks[:i]), count, (2, 0, 1), 1, "prefill")
        runner.step([chunk], [SequenceState(message)])
    return torch.cat(runner.logits)


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("name", ["experts by sigmoids, in groups", "limited gates, biases, sinks"])
def test_other_rows_do_not_change_a_bit(name: str, instructions: str) -> None:
    model = native_model(EXPERTS[name], NativeKernels(2, instructions))
    whole = logits_in_chunks(model, [80])
    for chunks in ([1, 79], [33, 40, 7]):
        assert torch.equal(logits_in_chunks(model, chunks), whole)


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("bits", [4, 8])
def test_experts_in_codes(bits: int, instructions: str) -> None:
    """Near to what the codes stand for: rows of a few are rounded to 8 bits."""
    spec = EXPERTS["a shared expert with a gate"]
    codes: dict[str, torch.Tensor | QuantizedWeight] = {}
    for path, weight in random_decoder(spec, torch.bfloat16).checkpoint_slots().items():
        codes[path] = (
            quantize(weight, bits) if "expert" in path and "gate.w" not in path else weight
        )
    found, exact = [], []
    for weights, logits in ((codes, found), ({n: plain(w) for n, w in codes.items()}, exact)):
        model = NativeModel(spec, NativeKernels(2, instructions))
        model.load_weights(weights.items())
        logits += [logits_in_chunks(model, chunks) for chunks in ([80], [1] * 5)]
    for ours, theirs in zip(found, exact, strict=True):
        error = (ours - theirs).abs().mean(1)
        assert float(error.median()) <= 0.01 * float(theirs.abs().max())
