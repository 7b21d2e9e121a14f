"""Quantized matrices that stay blocks of a file until native kernels pack them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import torch

from legato.model.quantization import QuantizedWeight


class BlockForm(NamedTuple):
    """A type of blocks.

    Attributes:
        number: of the type in the extension's `BlockType`.
        num_values: weights of a block.
        num_bytes: of a block.
        halves: places of the float16 scales in a block.
        bits: of a code.
        group: weights that share a scale.
        zero: the number of weight 0, if there are no minima.
        table: uint8 [16]; None if codes are numbers.
        split: returns the weight of blocks [N, bytes of a row] with its codes apart.
    """

    number: int
    num_values: int
    num_bytes: int
    halves: tuple[int, ...]
    bits: int
    group: int
    zero: int
    table: torch.Tensor | None
    split: Callable[[torch.Tensor], QuantizedWeight]


@dataclass(frozen=True)
class FileWeight(QuantizedWeight):
    """A matrix [N, K] of whole blocks. Its codes, scales and minima have shapes, but no values.

    Attributes:
        blocks: uint8 [N, bytes of a row].
    """

    blocks: torch.Tensor = field(kw_only=True)
    form: BlockForm = field(kw_only=True)

    def num_bytes(self, dtype: torch.dtype) -> int:
        return super().num_bytes(dtype) if self.is_stored_only else self.blocks.numel()

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return (self.blocks,)

    def split(self) -> QuantizedWeight:
        return replace(self.form.split(self.blocks), is_stored_only=self.is_stored_only)

    def in_columns(self, _size: int) -> QuantizedWeight:
        return self if _size % self.form.num_values == 0 else self.split()

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "FileWeight":
        blocks = change(self.blocks)
        own = file_weight(blocks, self.form)
        return replace(own, is_stored_only=self.is_stored_only)

    def halves(self) -> Iterator[torch.Tensor]:
        """Yield the float16 scales [N, blocks of a row], and other halves of each block."""
        blocks = self.blocks.reshape(len(self.blocks), -1, self.form.num_bytes)
        for place in self.form.halves:
            yield blocks[..., place : place + 2].contiguous().view(torch.float16)[..., 0]

    def _dequantized(self) -> torch.Tensor:
        return self.split()._dequantized()


def file_weight(blocks: torch.Tensor, form: BlockForm) -> FileWeight:
    """Return the matrix of blocks [N, bytes of a row]."""
    depth = blocks.shape[1] // form.num_bytes * form.num_values
    codes = torch.empty(len(blocks), depth, dtype=torch.uint8, device="meta")
    scales = torch.empty(len(blocks), depth // form.group, dtype=torch.float16, device="meta")
    return FileWeight(
        codes, scales, None, form.bits, zero=form.zero, table=form.table, blocks=blocks, form=form
    )


def stacked(parts: Sequence[object]) -> list[FileWeight]:
    """Concatenate rows of adjacent parts with blocks of one type; empty if others have none."""
    kept = [part for part in parts if isinstance(part, FileWeight) and not part.is_stored_only]
    if len(kept) < len(parts):
        return []
    stack: list[FileWeight] = []
    for _, adjacent in groupby(kept, key=lambda part: part.form.number):
        same = list(adjacent)
        blocks = [part.blocks for part in same]
        whole = blocks[0].contiguous() if len(blocks) == 1 else torch.cat(blocks)
        stack.append(file_weight(whole, same[0].form))
    return stack
