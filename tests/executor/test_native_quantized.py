"""Products with quantized weights: many rows as in bfloat16, few rows rounded to 8 bits."""

import random
from dataclasses import replace

import pytest
import torch

from legato import LLM, SamplingParams
from legato.core.config import Quantization
from legato.executor.attention.native_backend import NativeAttentionBackend
from legato.executor.torch_executor import TorchExecutor
from legato.model.base import NamedWeights
from legato.model.native import NativeKernels, NativeLinear, NativeModel, native_instructions
from legato.model.quantization import BLOCK, QuantizedWeight, plain, quantize
from legato.model.spec import DecoderSpec
from tests.executor.backends import BLOCK_SIZE
from tests.executor.by_hand import ByHand, prompt
from tests.executor.instructions import TESTED
from tests.executor.test_native import pytestmark as needs_native
from tests.model.random_models import SPECS, random_decoder

pytestmark = needs_native

FEW = 8


def matrix(num_outputs: int, depth: int, bits: int) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(bits)
    return quantize(torch.randn(num_outputs, depth, generator=generator), bits)


def rows_of(num_rows: int, depth: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, depth, generator=generator)
    rows[:, :BLOCK] = 0  # a block without a scale
    return rows.bfloat16()


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(32, 32), (576, 1536), (100, 96)])
@pytest.mark.parametrize("num_rows", [FEW + 1, 32, 33, 70])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_many_rows(
    instructions: str, bits: int, shape: tuple[int, int], num_rows: int, num_threads: int
) -> None:
    kernels = NativeKernels(num_threads, instructions)
    weight, rows = matrix(*shape, bits), rows_of(num_rows, shape[1])
    plain = NativeLinear(weight.dequantize().bfloat16(), kernels)
    assert torch.equal(NativeLinear(weight, kernels)(rows), plain(rows))


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(32, 32), (576, 1536), (100, 96)])
@pytest.mark.parametrize("num_rows", [1, 33])
def test_what_is_only_stored_as_codes(
    instructions: str, bits: int, shape: tuple[int, int], num_rows: int
) -> None:
    kernels = NativeKernels(2, instructions)
    weight, rows = matrix(*shape, bits), rows_of(num_rows, shape[1])
    plain = NativeLinear(weight.dequantize().bfloat16(), kernels)
    stored = replace(weight, is_stored_only=True)
    assert torch.equal(NativeLinear(stored, kernels)(rows), plain(rows))


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(32, 32), (576, 1536), (100, 96)])
@pytest.mark.parametrize("num_rows", range(1, FEW + 1))
def test_few_rows(instructions: str, bits: int, shape: tuple[int, int], num_rows: int) -> None:
    weight, rows = matrix(*shape, bits), rows_of(num_rows, shape[1])
    expected = to_8_bits(rows).double() @ weight.dequantize().double().T
    got = NativeLinear(weight, NativeKernels(2, instructions))(rows)
    assert torch.allclose(got.double(), expected, rtol=1e-4, atol=1e-4)


def to_8_bits(rows: torch.Tensor) -> torch.Tensor:
    """Each 32 values to whole multiples of the largest's 127th part."""
    blocks = rows.float().unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    codes = (blocks * (torch.tensor(127.0) / largest).nan_to_num(posinf=0)).round()
    return (codes * (largest / 127)).flatten(1)


@pytest.mark.parametrize("name", ["grouped", "biases", "normed heads, untied"])
def test_weights_quantized_in_part(name: str) -> None:
    """Of many rows a model computes the very numbers of what its codes stand for."""
    weights: dict[str, torch.Tensor | QuantizedWeight] = {}
    for path, weight in random_decoder(SPECS[name], torch.bfloat16).checkpoint_slots().items():
        is_quantized = weight.dim() == 2 and "k_proj" not in path and "layers.1.mlp" not in path
        weights[path] = quantize(weight, 4) if is_quantized else weight
    as_codes, num_bytes = prompt_scores(SPECS[name], weights.items())
    as_numbers, num_plain_bytes = prompt_scores(
        SPECS[name], ((path, plain(weight)) for path, weight in weights.items())
    )
    assert as_codes == as_numbers
    assert num_bytes < 0.7 * num_plain_bytes


@pytest.mark.parametrize("name", ["biases", "normed heads, untied"])
def test_weights_may_come_in_any_order(name: str) -> None:
    weights = list(random_decoder(SPECS[name], torch.bfloat16).checkpoint_slots().items())
    in_order = prompt_scores(SPECS[name], weights)
    for seed in range(3):
        random.Random(seed).shuffle(weights)
        assert prompt_scores(SPECS[name], weights) == in_order


def prompt_scores(spec: DecoderSpec, weights: NamedWeights) -> tuple[list[float], int]:
    model = NativeModel(spec, NativeKernels(2, native_instructions()[0]))
    model.load_weights(weights)
    attention = NativeAttentionBackend(model, model.cache, num_blocks=2, block_size=BLOCK_SIZE)
    hand = ByHand(TorchExecutor(model, attention, BLOCK_SIZE), range(2))
    stream = hand.add("a", prompt(40), prompt_logprobs=0)
    hand.step(a=40)
    return [entry.logprob for entry in stream.prompt_logprobs], model.num_weight_bytes


@pytest.mark.parametrize("quantization", ["gguf", "int8", "int4"])
def test_the_default_model_still_speaks(quantization: Quantization) -> None:
    llm = LLM(quantization=quantization, kv_cache_memory_bytes=512 * 2**20)
    prompts = ["The capital of France is", "Two, four, six,"]
    answers = llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0))
    texts = [answer.outputs[0].text for answer in answers]
    assert "Paris" in texts[0]
    assert "eight" in texts[1]
