"""Products with quantized weights: many rows as in bfloat16, few rows rounded to 8 bits."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from legato import LLM, SamplingParams
from legato.checkpoint.gguf import BLOCK_FORMS
from legato.core.config import Quantization
from legato.executor.attention.native_backend import NativeAttentionBackend
from legato.executor.torch_executor import TorchExecutor
from legato.model.file_weight import FileWeight, file_weight
from legato.model.model import NamedWeights
from legato.model.native_kernels import NativeKernels, native_instructions
from legato.model.native_model import NativeModel
from legato.model.native_operators import NativeLinear
from legato.model.partly_native import PartlyNativeDecoder
from legato.model.quantization import BLOCK, FLOAT8_TABLE, QuantizedWeight, plain, quantize
from legato.model.spec import DecoderSpec
from tests.executor.backends import BLOCK_SIZE
from tests.executor.by_hand import ByHand, prompt
from tests.executor.instructions import TESTED
from tests.executor.test_native import pytestmark as needs_native
from tests.model.random_models import SPECS, random_decoder

pytestmark = needs_native

FEW = 8
"""Up to so many rows are rounded on all instructions."""


def most_rounded(instructions: str, bits: int) -> int:
    """Most rows that are rounded."""
    is_slow = instructions.endswith("amx") or (instructions == "avx2" and bits == 8)
    return FEW if is_slow else 64


FORMS = {
    "int4": (4, 32, True),
    "int8": (8, 32, False),
    "int4 without minima": (4, 32, False),
    "int8 with minima": (8, 32, True),
    "int4, groups of 16": (4, 16, True),
    "int8, groups of 16": (8, 16, False),
    "int4, groups of 96": (4, 96, True),
    "table": (4, 32, False),
    "table, groups of 16": (4, 16, False),
    "reordered": (4, 32, True),
}
"""Key the form, value bits, group, and whether there are minima."""
SHAPES = [(32, 96), (576, 1536), (100, 192)]


def matrix(num_outputs: int, depth: int, form: str) -> QuantizedWeight:
    """Random codes. Scales have few digits, so that kernels compute with these very weights."""
    bits, group, has_minima = FORMS[form]
    generator = torch.Generator().manual_seed(depth)
    shape = (num_outputs, depth // group)
    scales = torch.randint(1, 64, shape, generator=generator) / 2.0**14
    minima = -torch.randint(0, 64, shape, generator=generator) / 2.0**11
    table = torch.randint(-128, 128, (16,), generator=generator).float()
    return QuantizedWeight(
        torch.randint(0, 2**bits, (num_outputs, depth), generator=generator).to(torch.uint8),
        scales,
        minima if has_minima else None,
        bits,
        zero=0 if has_minima or "table" in form else 2 ** (bits - 1),
        table=table if "table" in form else None,
        order=torch.randperm(depth, generator=generator).int() if form == "reordered" else None,
    )


def rows_of(num_rows: int, depth: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, depth, generator=generator)
    rows[:, :BLOCK] = 0  # a block without a scale
    return rows.bfloat16()


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_many_rows(instructions: str, form: str, shape: tuple[int, int], num_threads: int) -> None:
    kernels = NativeKernels(num_threads, instructions)
    weight = matrix(*shape, form)
    quantized = NativeLinear(weight, kernels)
    plain = NativeLinear(weight.dequantize().bfloat16(), kernels)
    most = most_rounded(instructions, weight.bits)
    for num_rows in (most + 1, most + 24, most + 25, most + 62):
        rows = rows_of(num_rows, shape[1])
        if weight.order is None:
            assert torch.equal(quantized(rows), plain(rows)), num_rows
        else:
            assert torch.allclose(quantized(rows), plain(rows), atol=1e-3), num_rows
    plain = NativeLinear(weight.dequantize().bfloat16(), kernels)
    stored = replace(weight, is_stored_only=True)
    assert torch.equal(NativeLinear(stored, kernels)(rows), plain(rows))


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows(instructions: str, form: str, shape: tuple[int, int]) -> None:
    weight = matrix(*shape, form)
    quantized = NativeLinear(weight, NativeKernels(2, instructions))
    order = slice(None) if weight.order is None else weight.order.long()
    columns = weight.dequantize()[:, order].double()
    most = most_rounded(instructions, weight.bits)
    for num_rows in {*range(1, FEW + 1), most // 2 + 1, most}:
        rows = rows_of(num_rows, shape[1])
        expected = to_8_bits(rows[:, order]).double() @ columns.T
        assert torch.allclose(quantized(rows).double(), expected, rtol=1e-4, atol=1e-4), num_rows


def blocks_of(
    kind: GGMLQuantizationType, num_outputs: int, depth: int, filled_with: int | None = None
) -> FileWeight:
    """Random bytes, or this one alone, but for the scales in float16."""
    form = BLOCK_FORMS[kind]
    generator = torch.Generator().manual_seed(depth)
    shape = (num_outputs, depth // form.num_values, form.num_bytes)
    blocks = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    if filled_with is not None:
        blocks[:] = filled_with
    for place in form.halves:
        halves = torch.rand(shape[:2], generator=generator).half() / 2**10
        blocks[..., place : place + 2] = halves[..., None].view(torch.uint8)
    return file_weight(blocks.flatten(1), form)


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("kind", BLOCK_FORMS)
@pytest.mark.parametrize("shape", [(100, 512), (64, 768)])
def test_blocks_of_a_file(
    instructions: str, kind: GGMLQuantizationType, shape: tuple[int, int]
) -> None:
    """As codes with scales and minima apart, whose dequantized weight is another module's."""
    weight = blocks_of(kind, *shape)
    kernels = NativeKernels(2, instructions)
    packed, columns = NativeLinear(weight, kernels), weight.dequantize()
    most = most_rounded(instructions, weight.bits)
    for num_rows in (*range(1, FEW + 1), most // 2 + 1, most):
        rows = rows_of(num_rows, shape[1])
        expected = to_8_bits(rows).double() @ columns.double().T
        assert relative_error(packed(rows), expected) < 1e-5, num_rows
    plain = NativeLinear(columns.bfloat16(), kernels)
    for num_rows in (most + 1, most + 25):
        rows = rows_of(num_rows, shape[1])
        assert torch.equal(packed(rows), plain(rows)), num_rows


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error over the largest number."""
    return float((got.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("kind", BLOCK_FORMS)
def test_no_sum_of_the_largest_codes_overflows(
    instructions: str, kind: GGMLQuantizationType
) -> None:
    """AVX2 sums products in 16 bits: all codes are the largest, and all numbers of rows."""
    for filled_with, value in ((0xFF, 1.0), (0xFF, -1.0), (0x7F, 1.0)):
        weight = blocks_of(kind, 32, 256, filled_with)
        packed = NativeLinear(weight, NativeKernels(1, instructions))
        for num_rows in (1, FEW):
            rows = torch.full((num_rows, 256), value).bfloat16()
            expected = rows.double() @ weight.dequantize().double().T
            # Scales and minima of one sign may cancel out.
            most = float(weight.dequantize().abs().sum(dim=1).max())
            assert float((packed(rows).double() - expected).abs().max()) < 1e-5 * most


@pytest.mark.parametrize("kind", BLOCK_FORMS)
def test_packed_blocks_take_the_bytes_of_the_file(kind: GGMLQuantizationType) -> None:
    """Within 3 %."""
    weight = blocks_of(kind, 256, 1024)
    packed = NativeLinear(weight, NativeKernels(1, native_instructions()[0])).native
    assert packed.num_bytes <= 1.03 * weight.blocks.numel()


@pytest.mark.parametrize(
    "kinds", [("Q4_0", "Q4_0", "Q8_0"), ("Q5_0", "Q4_1", "Q4_1"), ("Q5_1", "IQ4_NL", "Q4_0")]
)
def test_queries_keys_and_values_of_several_types_stay_apart(kinds: tuple[str, ...]) -> None:
    """Of many rows a model computes the very numbers of what the blocks stand for."""
    weights: dict[str, torch.Tensor | QuantizedWeight] = {}
    for path, weight in random_decoder(SPECS["grouped"], torch.bfloat16).checkpoint_slots().items():
        weights[path] = weight
        for name, kind in zip(("q_proj", "k_proj", "v_proj"), kinds, strict=True):
            if name in path:
                weights[path] = blocks_of(GGMLQuantizationType[kind], *weight.shape)
    in_blocks, num_bytes = prompt_scores(SPECS["grouped"], weights.items())
    as_numbers, num_plain_bytes = prompt_scores(
        SPECS["grouped"], ((path, plain(weight)) for path, weight in weights.items())
    )
    assert in_blocks == as_numbers
    assert num_bytes < num_plain_bytes


@pytest.mark.parametrize("instructions", TESTED)
def test_step_times_are_told_for_how_many_rows_weights_stay_packed(instructions: str) -> None:
    kernels = NativeKernels(2, instructions)
    weight = {bits: quantize(torch.randn(64, 96), bits) for bits in (4, 8)}
    assert kernels.most_packed(weight[4]) == most_rounded(instructions, 4)
    assert kernels.most_packed(weight[8]) == most_rounded(instructions, 8)
    rounding_rows = replace(weight[4], rounds_rows=True)
    in_blocks = 0 if instructions == "avx2" else most_rounded(instructions, 4)
    assert kernels.most_packed(rounding_rows) == in_blocks
    never_unpacked = replace(weight[8], is_rotated=True)
    always_unpacked = (
        replace(weight[8], table=FLOAT8_TABLE),
        replace(weight[4], is_stored_only=True),
    )
    for other in (never_unpacked, *always_unpacked, torch.randn(64, 96)):
        assert kernels.most_packed(other) == 0
    model = NativeModel(SPECS["grouped"], kernels)
    assert model.rows == kernels.rows
    slots = random_decoder(SPECS["grouped"], torch.bfloat16).checkpoint_slots()
    matrices = {name for name, weight in slots.items() if weight.dim() == 2}
    for packed in (matrices, {name for name in matrices if "down_proj" in name}):
        model = NativeModel(SPECS["grouped"], kernels)
        model.load_weights((n, quantize(w, 4) if n in packed else w) for n, w in slots.items())
        assert model.rows.most_packed == most_rounded(instructions, 4)


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("form", ["Q4_K", "simple"])
def test_what_is_only_stored_as_codes(instructions: str, bits: int, form: str) -> None:
    kernels = NativeKernels(2, instructions)
    generator = torch.Generator().manual_seed(bits)
    weight = quantize(torch.randn(100, 96, generator=generator), bits)
    if form == "Q4_K":  # scales of more digits than float16 has
        weight = replace(weight, scales=weight.scales.float() * 1.0001)
    plain = NativeLinear(weight.dequantize().bfloat16(), kernels)
    stored = NativeLinear(replace(weight, is_stored_only=True), kernels)
    for num_rows in (1, 33):
        rows = rows_of(num_rows, 96)
        assert torch.equal(stored(rows), plain(rows))


@pytest.mark.parametrize("instructions", TESTED)
def test_8_bit_floats(instructions: str) -> None:
    """Every number of theirs, subnormal ones too, times powers of two."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    generator = torch.Generator().manual_seed(0)
    codes = codes[torch.randint(0, 256, (100, 256), generator=generator)]
    scales = 2.0 ** torch.randint(-14, -8, (100, 2), generator=generator)
    weight = QuantizedWeight(codes, scales, None, 8, table=FLOAT8_TABLE)
    kernels = NativeKernels(2, instructions)
    quantized, plain = (
        NativeLinear(each, kernels) for each in (weight, weight.dequantize().bfloat16())
    )
    for num_rows in (1, FEW, 33):
        rows = rows_of(num_rows, 256)
        assert torch.equal(quantized(rows), plain(rows)), num_rows


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


@pytest.mark.parametrize("kind", [NativeModel, PartlyNativeDecoder])
@pytest.mark.parametrize("most_bytes", [2**30, 1])
def test_few_weights_wait_to_be_packed(
    kind: type[NativeModel | PartlyNativeDecoder], most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing is as late as it can be: weights are packed when their result is awaited."""
    waiting: set[object] = set()
    most = 0

    class LateThreads(ThreadPoolExecutor):
        def submit(self, work: Any, *args: Any) -> Any:  # type: ignore[override]
            nonlocal most
            late = LateResult(work, *args)
            waiting.add(late)
            most = max(most, len(waiting))
            return late

    class LateResult:
        def __init__(self, *call: Any) -> None:
            self._call, self._found = call, None

        def result(self) -> object:
            if self in waiting:
                waiting.remove(self)
                work, *args = self._call
                self._found = work(*args)
            return self._found

    monkeypatch.setattr("legato.model.packing.ThreadPoolExecutor", LateThreads)
    monkeypatch.setattr("legato.model.packing._MOST_BYTES", most_bytes)
    layers = SPECS["grouped"].layers * 4
    spec = msgspec.structs.replace(SPECS["grouped"], layers=layers)
    kernels = NativeKernels(2, native_instructions()[0])
    slots = random_decoder(spec, torch.bfloat16).checkpoint_slots()
    kind(spec, kernels).load_weights(slots.items())
    assert most == (2 if most_bytes == 1 else kernels.num_threads + 1)


def prompt_scores(spec: DecoderSpec, weights: NamedWeights) -> tuple[list[float], int]:
    model = NativeModel(spec, NativeKernels(2, native_instructions()[0]))
    model.load_weights(weights)
    attention = NativeAttentionBackend(model, model.cache, num_blocks=3, block_size=BLOCK_SIZE)
    hand = ByHand(TorchExecutor(model, attention, BLOCK_SIZE), range(3))
    stream = hand.add("a", prompt(80), prompt_logprobs=0)
    hand.step(a=80)
    return [entry.logprob for entry in stream.prompt_logprobs], model.num_weight_bytes


@pytest.mark.parametrize("quantization", ["gguf", "int8", "int4", "w8a8", "w4a8"])
def test_the_default_model_still_speaks(quantization: Quantization) -> None:
    llm = LLM(quantization=quantization, max_model_len=64, kv_cache_memory_bytes=2**24)
    prompts = ["The capital of France is", "Two, four, six,"]
    answers = llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0.0))
    texts = [answer.outputs[0].text for answer in answers]
    assert "Paris" in texts[0]
    assert "eight" in texts[1]
