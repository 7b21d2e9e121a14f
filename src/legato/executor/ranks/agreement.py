"""Ranks that agree on whether all of them computed something."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch

from legato.model.communicator import Communicator, RankLostError

_Value = TypeVar("_Value")


class Exchange(NamedTuple):
    """A call of the communicator that all ranks take part in."""

    kind: Literal["sum", "gather"]
    shape: tuple[int, ...]
    dtype: torch.dtype


class FailedElsewhereError(Exception):
    """Another rank could not compute its part, so that there is no whole."""


class Agreement:
    """A `Communicator` that is left by all ranks at the same place, whatever fails on one of them.

    A rank that cannot go on still takes part, with zeros, in what the others wait for. Nobody then
    uses what came of it.

    Args:
        group: the ranks.
    """

    def __init__(self, group: Communicator) -> None:
        self._group = group
        self._num_done = 0
        self._failed = torch.zeros(1)

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        result = self._group.sum(values)
        self._num_done += 1
        return result

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        result = self._group.gather(values)
        self._num_done += 1
        return result

    def together(self, exchanges: Sequence[Exchange], compute: Callable[[], _Value]) -> _Value:
        """What comes of `compute`, on all ranks or on none.

        Args:
            exchanges: all that it takes part in, in their order.

        Raises:
            FailedElsewhereError: another rank raised something.
            RankLostError: another rank is gone.
            Exception: whatever `compute` raises.
        """
        self._num_done = 0
        try:
            result = compute()
        except RankLostError:
            raise
        except Exception:
            for exchange in exchanges[self._num_done :]:
                getattr(self._group, exchange.kind)(
                    torch.zeros(exchange.shape, dtype=exchange.dtype)
                )
            self._all_are_well(False)
            raise
        if not self._all_are_well(True):
            raise FailedElsewhereError
        return result

    def _all_are_well(self, is_well: bool) -> bool:
        self._failed.fill_(not is_well)
        return not self._group.sum(self._failed).item()
