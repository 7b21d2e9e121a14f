"""NaN in, NaN out: no kernel of any instructions drops one, and none gives it to a neighbour.

Then the logits of the request are not finite, and it ends with an error. A model that computes NaN
is refused by its first pass.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.core.errors import UnsupportedModelError
from legato.executor.attention.native_backend import NativeAttentionBackend
from legato.executor.batch import PackedBatch
from legato.executor.first_pass import check_forward
from legato.model.mixer_spec import RecurrenceSpec, ShortConvSpec
from legato.model.model import CacheSpec, LayerCache
from legato.model.native_attention import ReadsNativeCache
from legato.model.native_kernels import NativeKernels
from legato.model.native_model import NativeModel
from legato.model.native_operators import NativeLinear, NativeMLP, NativeNorm, NativeProduct
from legato.model.quantization import FLOAT8_TABLE, QuantizedWeight, quantize, quantize_rotated
from legato.model.spec import DecoderSpec
from legato.model.states import StateRun
from tests.executor.instructions import TESTED
from tests.executor.test_native import BLOCK_SIZE
from tests.executor.test_native import pytestmark as needs_native
from tests.executor.test_native_experts import MIXTURES, mixture_of, native_mixture
from tests.executor.test_native_experts import random_rows as mixture_rows
from tests.executor.test_native_quantized import FORMS, matrix
from tests.model.random_models import EXPERTS, SPECS, decoder_spec, random_decoder
from tests.model.test_native_recurrence import MIXERS, Step
from tests.profiles import examples

pytestmark = needs_native
every_set = pytest.mark.parametrize("instructions", TESTED)

ODD_NAN = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
"""All bits set, as erased memory has them: rounding such a number up carries into its sign."""
ROW_COUNTS = (1, 4, 9, 33, 80)
DEPTH = 192
_FLOAT8 = quantize(torch.randn(64, DEPTH, generator=torch.Generator().manual_seed(0)), 8)
WEIGHTS: dict[str, Callable[[], torch.Tensor | QuantizedWeight]] = {
    "bfloat16": lambda: torch.randn(64, DEPTH).bfloat16(),
    **{form: lambda form=form: matrix(64, DEPTH, form) for form in FORMS},
    "8-bit floats": lambda: replace(_FLOAT8, codes=_FLOAT8.codes & 0x77, table=FLOAT8_TABLE),
    "w8a8": lambda: quantize_rotated(torch.randn(64, DEPTH)),
    "w4a8": lambda: replace(matrix(64, DEPTH, "int4"), rounds_rows=True),
}

Compute = Callable[[torch.Tensor], torch.Tensor]
places = st.tuples(st.integers(0, 79), st.integers(0, DEPTH - 1))


def check_rows(
    compute: Compute, rows: torch.Tensor, row: int, column: int, tolerance: float = 0.0
) -> None:
    """One row gets a NaN: all of its results become NaN, and no bit of the others changes.

    Args:
        tolerance: of the others, if their number in a product decides how that is computed.
    """
    expected = compute(rows)
    assert expected.isfinite().all()
    rows = rows.clone()
    rows[row % len(rows), column % rows.shape[1]] = torch.nan
    found = compute(rows)
    assert found[row % len(rows)].isnan().all()
    found[row % len(rows)] = expected[row % len(rows)]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance)


def random_rows(count: int, depth: int = DEPTH) -> torch.Tensor:
    return torch.randn(count, depth, generator=torch.Generator().manual_seed(count)).bfloat16()


@every_set
@pytest.mark.parametrize("form", WEIGHTS)
def test_products(instructions: str, form: str) -> None:
    torch.manual_seed(1)
    linear = NativeLinear(WEIGHTS[form](), NativeKernels(2, instructions))

    @given(st.sampled_from(ROW_COUNTS), places, st.booleans())
    @examples(12)
    def check(count: int, place: tuple[int, int], is_infinite: bool) -> None:
        rows = random_rows(count)
        check_rows(linear, rows, *place)
        if is_infinite:
            rows[place[0] % count, place[1]] = torch.inf
            assert not linear(rows)[place[0] % count].isfinite().any()

    check()


@every_set
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_norms(instructions: str, dtype: torch.dtype) -> None:
    norm = NativeNorm(torch.rand(DEPTH) + 0.5, 1e-5, NativeKernels(2, instructions))
    for count in ROW_COUNTS:
        check_rows(norm, random_rows(count).to(dtype), count // 2, 21)
    for nan in ODD_NAN:
        weight = torch.ones(DEPTH)
        weight[37] = nan
        norm = NativeNorm(weight, 1e-5, NativeKernels(1, instructions))
        assert norm(random_rows(3))[:, 37].isnan().all()


@every_set
@pytest.mark.parametrize("is_gelu", [False, True])
def test_gated_mlps(instructions: str, is_gelu: bool) -> None:
    kernels = NativeKernels(2, instructions)
    generator = torch.Generator().manual_seed(2)
    shapes = ((96, DEPTH), (96, DEPTH), (DEPTH, 96))
    weights = [torch.randn(shape, generator=generator) * 0.1 for shape in shapes]

    def mlp() -> NativeMLP:
        products = (NativeProduct(weight, None, torch.bfloat16, kernels) for weight in weights)
        return NativeMLP(*products, is_gelu=is_gelu, kernels=kernels)

    for count in ROW_COUNTS:
        check_rows(mlp(), random_rows(count), count // 2, 100)
    for weight in weights[:2]:  # a gate alone, an up projection alone
        kept = weight[5, 7].clone()
        weight[5, 7] = torch.nan
        assert mlp()(random_rows(9)).isnan().all()
        weight[5, 7] = kept


@every_set
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("name", MIXTURES)
@torch.inference_mode()
def test_mixtures(instructions: str, name: str, bits: int | None) -> None:
    native = native_mixture(mixture_of(MIXTURES[name], torch.bfloat16), bits, instructions)
    for count in ROW_COUNTS:
        check_rows(native, mixture_rows(count), count // 2, 40, 0.05 if bits else 0.0)


@every_set
@pytest.mark.parametrize("name", MIXTURES)
@torch.inference_mode()
def test_nan_weights_of_mixtures_reach_the_rows_that_pytorch_says(
    instructions: str, name: str
) -> None:
    """Of one number anywhere: in a router's row, in gates that have limits, in squares."""
    rows = mixture_rows(80)
    for path, weight in mixture_of(MIXTURES[name], torch.bfloat16).named_parameters():
        mixture = mixture_of(MIXTURES[name], torch.bfloat16)
        own = dict(mixture.named_parameters())[path]
        own.view(-1)[-1 if weight.dim() == 1 else weight.numel() // 3] = torch.nan
        found = native_mixture(mixture, None, instructions)(rows)
        expected = mixture(rows)
        assert torch.equal(found.isnan(), expected.isnan()), path


class Reader(ReadsNativeCache):
    """What attention needs of a model."""

    def __init__(self, kernels: NativeKernels, num_heads: int) -> None:
        self.kernels, self._num_heads = kernels, num_heads

    @property
    def num_heads(self) -> int:
        return self._num_heads


LENGTHS = (20, 1300, 1, 300)
"""Rows of each request's prompt; two threads share the long one's keys."""
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32


def attend(
    instructions: str, rows: list[torch.Tensor], *, is_quantized: bool, window: int | None
) -> torch.Tensor:
    spec = CacheSpec(layers=(LayerCache(KV_HEADS, HEAD_DIM, window),), dtype=torch.bfloat16)
    spec = replace(spec, is_quantized=is_quantized)
    num_blocks = np.array([-(-length // BLOCK_SIZE) for length in LENGTHS])
    first = np.cumsum(num_blocks) - num_blocks
    backend = NativeAttentionBackend(
        Reader(NativeKernels(2, instructions), HEADS),
        spec,
        num_blocks=int(num_blocks.sum()),
        block_size=BLOCK_SIZE,
    )
    total = sum(LENGTHS)
    slots = [
        block * BLOCK_SIZE + i for block, n in zip(first, LENGTHS, strict=True) for i in range(n)
    ]
    table = np.zeros((len(LENGTHS), num_blocks.max()), dtype=np.int32)
    for row, (begin, count) in enumerate(zip(first, num_blocks, strict=True)):
        table[row, :count] = np.arange(begin, begin + count)
    batch = PackedBatch(
        input_ids=torch.zeros(total),
        positions=torch.zeros(total),
        sample_rows=torch.zeros(1),
        slot_mapping=np.array(slots, dtype=np.int64),
        query_start=np.cumsum([0, *LENGTHS]).astype(np.int32),
        context_len=np.array(LENGTHS, dtype=np.int32),
        block_table=table,
    )
    step = backend.begin_step(batch)
    query, key, value = rows
    return step.attend(0, query, key, value, scale=HEAD_DIM**-0.5, sliding_window=window)


@every_set
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_attention(instructions: str, part: str, is_quantized: bool, window: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [
        torch.randn(sum(LENGTHS), heads, HEAD_DIM, generator=generator).bfloat16()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    options = {"is_quantized": is_quantized, "window": window}
    expected = attend(instructions, rows, **options)
    assert expected.isfinite().all()
    start = LENGTHS[0]
    for position in (0, 5, 700, 1299):
        at = start + position
        changed = [each.clone() for each in rows]
        changed[("query", "key", "value").index(part)][at, 0, 7] = torch.nan
        found = attend(instructions, changed, **options).view(-1, HEADS, HEAD_DIM)
        last = start + (LENGTHS[1] if window is None else min(LENGTHS[1], position + window))
        seen = slice(at, at + 1 if part == "query" else last)
        heads = slice(0, 1 if part == "query" else HEADS // KV_HEADS)
        of_value = slice(7, 8) if part == "value" and not is_quantized else slice(None)
        assert found[seen, heads, of_value].isnan().all(), position
        others = torch.ones(sum(LENGTHS), dtype=torch.bool)
        others[start : start + LENGTHS[1]] = False
        whole = expected.view_as(found)
        assert torch.equal(found[others], whole[others]), position


@every_set
@pytest.mark.parametrize("name", MIXERS)
@torch.inference_mode()
def test_recurrences(instructions: str, name: str) -> None:
    """The run becomes NaN from its row on, and so does the state that it leaves."""
    own: RecurrenceSpec = MIXERS[name]
    step = Step(
        own, [(9, 0, False), (130, 3, False), (1, 5, False), (4, 7, True)], 1, torch.float32
    )
    expected, *states = step.computed(instructions)
    middle: StateRun = step.runs[1]
    for row in (middle.start, middle.start + 70, step.runs[2].start):
        kept = step.rows[row].clone()
        step.rows[row] = torch.nan
        found, *after = step.computed(instructions)
        step.rows[row] = kept
        [run] = [run for run in step.runs if run.start <= row < run.end]
        reach = own.kernel_size if isinstance(own, ShortConvSpec) else run.end - row
        assert found[row : min(run.end, row + reach)].isnan().all()
        if not isinstance(own, ShortConvSpec):
            assert after[-1][run.destination].isnan().any()
        others = torch.ones(len(found), dtype=torch.bool)
        others[run.start : run.end] = False
        assert torch.equal(found[others], expected[others])
        for part, before in zip(after, states, strict=True):
            slots = torch.arange(len(part)) != run.destination
            assert torch.equal(part[slots], before[slots])


@every_set
@pytest.mark.parametrize("name", [*SPECS, *EXPERTS])
def test_first_pass(instructions: str, name: str) -> None:
    """One NaN in any tensor of a layer, and the model is refused."""
    spec = {**SPECS, **EXPERTS}[name]
    slots = random_decoder(spec, torch.bfloat16).checkpoint_slots()
    for path in slots:
        if not path.startswith("model.layers.") or ".experts." in path:
            continue  # few rows read an embedding, or meet an expert
        if path.endswith("selection_bias"):
            continue  # which orders experts, and is no part of a result
        weights = {key: value.clone() for key, value in slots.items()}
        weights[path].view(-1)[-1] = torch.nan
        with pytest.raises(UnsupportedModelError, match="computes NaN or infinities"):
            first_pass(spec, instructions, weights)


@every_set
@pytest.mark.parametrize("part", ["k_proj", "q_proj", "v_proj"])
def test_first_pass_where_attention_overflows(instructions: str, part: str) -> None:
    spec = decoder_spec(tie_word_embeddings=False)
    weights = random_decoder(spec, torch.bfloat16).checkpoint_slots()
    weights[f"model.layers.1.self_attn.{part}.weight"].mul_(3e38)
    with pytest.raises(UnsupportedModelError, match=r"^model\.layers\.1 computes NaN"):
        first_pass(spec, instructions, weights)


def first_pass(spec: DecoderSpec, instructions: str, weights: dict[str, torch.Tensor]) -> None:
    model = NativeModel(spec, NativeKernels(2, instructions))
    model.load_weights(weights.items())
    backend = NativeAttentionBackend(model, model.cache, num_blocks=2, block_size=BLOCK_SIZE)
    check_forward(
        model, backend, block_size=BLOCK_SIZE, vocab_size=spec.vocab_size, max_len=2 * BLOCK_SIZE
    )
