"""Exchanges between the ranks of a model that is divided among processes.

Every rank has a part of each matrix, computes the same step with it, and makes these calls in the
same order, with tensors of the same shapes and dtypes.
"""

from typing import Protocol

import torch


class Communicator(Protocol):
    """Attributes: rank: of this process, in [0, size); size: number of ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum contiguous `values` of all ranks in place; return them.

        Raises:
            RankLostError: another rank is gone or does not answer.
        """
        ...

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Concatenate contiguous `values` [S, N] of all ranks to [S, size * N] on rank 0.

        The result on other ranks is meaningless.

        Raises:
            RankLostError: as `sum`.
        """
        ...


class RankLostError(Exception):
    """Another rank is gone, and its part of the model with it."""


class Alone:
    """The only rank, with the whole model."""

    rank = 0
    size = 1

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values


ALONE = Alone()


def part_size(size: int, num_ranks: int) -> int:
    """Return the size of a rank's part of `size` rows; the last parts include padding."""
    return -(-size // num_ranks)
