"""Rotates the inputs of a matrix, so that few columns of them are much larger than the others.

One scale for a whole row of 8-bit activations suits only values of similar size. An orthogonal
matrix leaves products as they were if rows and weights are both multiplied with it (Ashkboos et
al., 2024, arXiv:2404.00456, QuaRot). Here it consists of Hadamard matrices. Each mixes up to 16
values that are 16 columns apart: native kernels need only sums of whole vectors for that.
"""

import torch

_LANES = 16
_MOST_VECTORS = 16


def rotate(rows: torch.Tensor) -> torch.Tensor:
    """Rotate rows [N, K], K a multiple of 32, to float32 [N, K]. Rotating twice changes nothing."""
    vectors = rows.float().reshape(len(rows), -1, _LANES)
    rotated = torch.empty_like(vectors)
    count, first = _MOST_VECTORS, 0
    while first < vectors.shape[1]:
        while count > vectors.shape[1] - first:
            count //= 2
        part = slice(first, first + count)
        torch.matmul(hadamard(count), vectors[:, part], out=rotated[:, part])
        first += count
    return rotated.flatten(1)


def hadamard(size: int) -> torch.Tensor:
    """Return Sylvester's matrix [size, size] of a power of two, scaled to be orthogonal."""
    matrix = torch.ones(1, 1)
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while len(matrix) < size:
        matrix = torch.kron(pair, matrix)
    scaled: torch.Tensor = matrix / size**0.5
    return scaled
