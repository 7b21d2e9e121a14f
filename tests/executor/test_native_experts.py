"""Experts in native layers, and alone in PyTorch's layers, in plain weights and in codes."""

from functools import partial

import pytest
import torch

from legato.core.plan import ScheduledChunk
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.executor.attention.native_backend import NativeAttentionBackend
from legato.executor.sequence import SequenceState
from legato.model.experts import MixtureOfExperts
from legato.model.mlp_spec import MoeSpec
from legato.model.native_kernels import NativeKernels
from legato.model.native_model import NativeModel
from legato.model.native_operators import NativeMixture, pack_experts
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


HIDDEN = 64
MIXTURES: dict[str, MoeSpec] = {
    **{name: spec.layers[-1].moe for name, spec in EXPERTS.items()},
    "squares without gates": MoeSpec(
        num_experts=6,
        num_active=3,
        size=96,
        activation="relu2",
        is_gated=False,
        has_bias=True,
        score="sigmoid",
        shared_size=40,
    ),
}


def mixture_of(moe: MoeSpec, dtype: torch.dtype) -> MixtureOfExperts:
    """PyTorch's, with the same weights for every dtype."""
    generator = torch.Generator().manual_seed(5)
    mixture = MixtureOfExperts(moe, HIDDEN, partial(torch.empty, dtype=dtype))
    for weight in mixture.parameters():
        weight.copy_((torch.randn(weight.shape, generator=generator) * 0.15).bfloat16())
    return mixture


def native_mixture(mixture: MixtureOfExperts, bits: int | None, instructions: str) -> NativeMixture:
    """A mixture with PyTorch's shared expert; `bits` of the codes of the others, None for none."""
    weights: dict[str, torch.Tensor | QuantizedWeight] = {
        f"mlp.{name}": weight
        for name, weight in mixture.named_parameters()
        if name.startswith(("gate.", "shared_expert_gate."))
    }
    for name, weight in mixture.experts.checkpoint_slots("mlp.experts"):
        is_coded = bits is not None and name.endswith("weight")
        weights[name] = quantize(weight, bits) if is_coded else weight
    kernels = NativeKernels(2, instructions)
    experts = pack_experts(mixture.gate.spec, HIDDEN, weights, kernels)
    return NativeMixture(experts, mixture.shared_expert, kernels)


def random_rows(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).bfloat16()


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("name", MIXTURES)
@torch.inference_mode()
def test_a_mixture_alone_is_as_exact_as_pytorch(name: str, instructions: str) -> None:
    """The same experts for every row: all routers read the same numbers, and choose in float32."""
    moe = MIXTURES[name]
    rounded, exact = (mixture_of(moe, dtype) for dtype in (torch.bfloat16, torch.float32))
    native = native_mixture(rounded, None, instructions)
    for count in (1, 7, 80):
        rows = random_rows(count)
        expected = exact(rows.float())
        error, allowed = ((found(rows) - expected).abs() for found in (native, rounded))
        largest = float(expected.abs().max())
        assert float(error.mean()) <= 1.05 * float(allowed.mean())
        assert float(error.max()) <= 1.2 * float(allowed.max()) + 0.002 * largest


@pytest.mark.parametrize("instructions", TESTED)
@torch.inference_mode()
def test_other_rows_of_a_mixture_change_no_bit(instructions: str) -> None:
    moe = MIXTURES["limited gates, biases, sinks"]
    native = native_mixture(mixture_of(moe, torch.bfloat16), None, instructions)
    rows = random_rows(80)
    whole = native(rows)
    for lengths in ([1, 79], [33, 40, 7]):
        assert torch.equal(torch.cat([native(part) for part in rows.split(lengths)]), whole)


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("bits", [4, 8])
@torch.inference_mode()
def test_a_mixture_in_codes(bits: int, instructions: str) -> None:
    """Near to what the codes stand for: rows of a few are rounded to 8 bits."""
    moe = MIXTURES["a shared expert with a gate"]
    mixture = mixture_of(moe, torch.bfloat16)
    native = native_mixture(mixture, bits, instructions)
    for _, weight in mixture.experts.checkpoint_slots("mlp.experts"):
        weight.copy_(plain(quantize(weight, bits)))
    for count in (1, 80):
        rows = random_rows(count)
        expected = mixture(rows)
        assert float((native(rows) - expected).abs().mean()) <= 0.01 * float(expected.abs().max())
