"""Native products and attention of every row count, on every set of instructions."""

import os

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from legato.checkpoint.gguf_blocks import split_blocks
from legato.executor import kernel_check
from legato.executor.kernel_check import ALL_COUNTS, START_COUNTS, choose_kernels, disagreements
from legato.model.native_kernels import NativeKernels, emulated_instructions, native_instructions
from legato.model.native_operators import NativeLinear
from legato.model.quantization import BLOCK, QuantizedWeight
from tests.executor.checked import checked_again  # noqa: F401
from tests.executor.instructions import SETS, TESTED, module_of

OUTPUTS, DEPTH = 100, 192


@pytest.mark.skipif(
    not native_instructions() and "CI" not in os.environ, reason="no kernels were compiled"
)
@pytest.mark.parametrize("instructions", SETS)
def test_every_set_of_instructions_runs(instructions: str) -> None:
    assert module_of(instructions), f"{instructions} runs neither natively nor by emulation"


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_every_row_count(instructions: str, num_threads: int) -> None:
    assert not list(disagreements(NativeKernels(num_threads, instructions), ALL_COUNTS))


@pytest.mark.parametrize("instructions", TESTED)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("is_stored_only", [False, True])
def test_every_row_count_of_gguf_weights(
    instructions: str, kind: str, is_stored_only: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(OUTPUTS, DEPTH, generator=generator).numpy()
    quantized = quantize(values, GGMLQuantizationType[kind])
    blocks = split_blocks(
        quantized.reshape(OUTPUTS * DEPTH // BLOCK, -1), GGMLQuantizationType[kind]
    )
    assert blocks is not None
    codes, scales, minima = (
        None if part is None else torch.from_numpy(part.reshape(OUTPUTS, -1)) for part in blocks[:3]
    )
    weight = QuantizedWeight(codes, scales, minima, blocks.bits, is_stored_only, blocks.zero)
    plain = torch.from_numpy(dequantize(quantized, GGMLQuantizationType[kind]).astype(np.float32))
    rows = torch.randn(len(ALL_COUNTS), DEPTH, generator=generator).bfloat16()
    exact = rows.float() @ plain.T
    linear = NativeLinear(weight, NativeKernels(2, instructions))
    for count in ALL_COUNTS:
        errors = (linear(rows[:count]) - exact[:count]).norm(dim=1) / exact[:count].norm(dim=1)
        assert float(errors.max()) < 0.02, count


@pytest.mark.parametrize("instructions", SETS)
def test_emulation_computes_the_same_bits(instructions: str) -> None:
    emulated = f"emulated_{instructions}"
    if instructions not in native_instructions() or emulated not in emulated_instructions():
        pytest.skip("needs both")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(OUTPUTS, DEPTH, generator=generator).bfloat16()
    rows = torch.randn(len(ALL_COUNTS), DEPTH, generator=generator).bfloat16()
    for name, weight in kernel_check._forms(values).items():
        ours, theirs = (
            NativeLinear(weight, NativeKernels(1, each)) for each in (emulated, instructions)
        )
        for count in ALL_COUNTS:
            assert torch.equal(ours(rows[:count]), theirs(rows[:count])), (name, count)


@pytest.mark.skipif(len(native_instructions()) < 1, reason="no native kernels run here")
class TestChoice:
    def test_the_best_set_that_agrees_is_chosen(self) -> None:
        assert choose_kernels(native_instructions()).instructions == native_instructions()[0]
        assert choose_kernels([]).instructions is None

    @pytest.mark.usefixtures("checked_again")
    def test_wrong_kernels_are_rejected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernel_check, "NativeLinear", WrongLinear)
        choice = choose_kernels(native_instructions())
        assert choice.instructions is None
        assert list(choice.rejected) == native_instructions()
        assert all("17 rows" in problem for problem in choice.rejected.values())

    def test_edges_are_checked_at_the_start(self) -> None:
        """Blocks of 6 and 8 rows, tiles of 16 and strips of 32 begin and end at these counts."""
        for edge in (6, 8, 12, 16, 24, 32, 48, 64):
            assert {edge - 1, edge, edge + 1} <= set(START_COUNTS)


class WrongLinear(NativeLinear):
    """Reads the wrong row where a block crosses a tile's edge."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out = super().__call__(rows)
        if len(rows) == 17:
            out[16] = torch.nan
        return out
