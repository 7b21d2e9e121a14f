"""How a published checkpoint holds a quantized matrix: its tensors, their shapes and types."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, Self

import torch

from legato.core.errors import UnsupportedModelError
from legato.model.quantization import QuantizedWeight

FLOATS = ("BF16", "F16", "F32")
SCALAR_SHAPES = ((), (1,))
"""Both shapes of a single number."""

Load = Callable[[str], torch.Tensor]
"""From a suffix to the tensor of that name."""
Parts = Mapping[str, torch.Tensor]
"""Key the suffix, value the tensor."""


class Header(NamedTuple):
    """Attributes: `dtype` in safetensors' spelling."""

    dtype: str
    shape: tuple[int, ...]


def num_bytes(header: Header) -> int:
    """Return the size of a tensor in its file."""
    digits = "".join(filter(str.isdigit, header.dtype.partition("_")[0]))
    return math.prod(header.shape) * int(digits or 8) // 8


class Part(NamedTuple):
    """What a tensor of a quantized matrix has to be.

    Attributes:
        shapes: any of these.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_optional: bool = False


class Scheme(Protocol):
    """A way of holding quantized matrices.

    Attributes:
        markers: suffixes; every quantized module has one of them, and no other module does.
        suffixes: of a matrix's tensors; after a dot, unless they begin with an underscore. An empty
            one is the module's own name.
    """

    @property
    def markers(self) -> tuple[str, ...]: ...
    @property
    def suffixes(self) -> tuple[str, ...]: ...

    def of(self, headers: Mapping[str, Header]) -> "Scheme | None":
        """Return the scheme of a module with these tensors; None if another scheme holds it."""
        ...

    def size(self, headers: Mapping[str, Header], load: Load) -> tuple[int, int]:
        """Return the matrix's outputs and inputs by its tensors' headers."""
        ...

    def parts(self, num_outputs: int, depth: int) -> dict[str, Part]:
        """Return what each tensor of a matrix of this size has to be; key the suffix.

        Raises:
            UnsupportedModelError: the sizes are no whole groups.
        """
        ...

    def read(self, parts: Parts) -> QuantizedWeight | torch.Tensor:
        """Return the matrix, as float32 if its form cannot stay quantized."""
        ...


class Uniform:
    """A scheme that holds all quantized matrices of a checkpoint alike."""

    def of(self, _: Mapping[str, Header]) -> Self:
        return self


def check_parts(name: str, headers: Mapping[str, Header], parts: Mapping[str, Part]) -> None:
    """Refuse a matrix whose tensors are missing or have other shapes or types.

    Args:
        name: of the module, for messages.
        headers: key the suffix.

    Raises:
        UnsupportedModelError: it names the tensor.
    """
    for suffix, part in parts.items():
        header = headers.get(suffix)
        if header is None:
            if part.is_optional:
                continue
            raise UnsupportedModelError(f"{name}.{suffix} is missing")
        if header.dtype not in part.dtypes or header.shape not in part.shapes:
            raise UnsupportedModelError(
                f"{name}.{suffix} has type {header.dtype} and shape {header.shape} instead of "
                f"{' or '.join(part.dtypes)} and {' or '.join(map(str, part.shapes))}"
            )


def num_groups(depth: int, group: int) -> int:
    """Return the groups of a row.

    Raises:
        UnsupportedModelError: they are not whole.
    """
    if depth % group:
        raise UnsupportedModelError(f"rows of {depth} weights are no whole groups of {group}")
    return depth // group


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return uint8 [N, K] codes of int32 words [N, K * bits / 32], the lowest bits first.

    Words are little-endian, here as in the file, so that their bytes are in order. Shifted words
    would take four times as much memory as the codes.
    """
    in_bytes = words.contiguous().view(torch.uint8)
    return nibbles(in_bytes) if bits == 4 else in_bytes


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return uint8 [N, 2 K] codes of bytes [N, K], the lower half first."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)


def affine(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bits: int
) -> QuantizedWeight:
    """Return weights `scale * (code - zero)`, without minima if all zeros are one number.

    Args:
        codes: uint8 [N, K].
        scales: [N, K / group] of any float dtype.
        zeros: integers [N, K / group].
    """
    scales = scales.float()
    zero = int(zeros.flatten()[0])
    if bool((zeros == zero).all()):
        return QuantizedWeight(codes, scales, None, bits, zero=zero)
    return QuantizedWeight(codes, scales, -scales * zeros, bits)
