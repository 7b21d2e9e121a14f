"""Ranks agree whether all of them have computed their part."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

import torch

from legato.model.communicator import Communicator, RankLostError

_Value = TypeVar("_Value")


class Exchange(NamedTuple):
    """A call of the communicator in which all ranks take part."""

    kind: Literal["sum", "gather"]
    shape: tuple[int, ...]
    dtype: torch.dtype


class FailedElsewhereError(Exception):
    """Another rank could not compute its part, so there is no result."""


class Agreement:
    """A `Communicator` that all ranks leave at the same place, even if one of them fails.

    A rank that fails still takes part, with zeros, in the exchanges that the other ranks wait for.
    No rank then uses the result.

    Args:
        group: the communicator of the ranks.
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
        """Run `compute` so that it succeeds on all ranks or on none.

        Args:
            exchanges: all exchanges that it takes part in, in their order.

        Raises:
            FailedElsewhereError: another rank raised something.
            RankLostError: another rank is gone.
            Exception: any error that `compute` raises.
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
        assert self._num_done == len(exchanges), "a rank that fails would leave the others waiting"
        return result

    def _all_are_well(self, is_well: bool) -> bool:
        self._failed.fill_(not is_well)
        return not self._group.sum(self._failed).item()
