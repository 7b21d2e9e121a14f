"""What the ranks of a model that is divided among processes do together.

Every rank has a part of each matrix, computes the same step with it, and calls these in the same
order, with tensors of the same shapes and dtypes.
"""

from typing import Protocol

import torch


class Communicator(Protocol):
    """Attributes: rank: of this process, in [0, size); size: how many ranks there are."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add up contiguous `values` of all ranks, in place; returns them.

        Raises:
            RankLostError: another rank is gone, or does not answer.
        """
        ...

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Put contiguous `values` [S, N] of all ranks side by side: [S, size * N] for rank 0.

        The others get something of no meaning.

        Raises:
            RankLostError: as `sum`.
        """
        ...


class RankLostError(Exception):
    """Another rank is gone, and with it a part of the model."""


class Alone:
    """The only rank, which has all of the model."""

    rank = 0
    size = 1

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values


ALONE = Alone()


def part_size(size: int, num_ranks: int) -> int:
    """What a rank has of so many rows, the last of them less, or nothing but padding."""
    return -(-size // num_ranks)
