"""Exchanges between ranks, as torch.distributed is asked for them."""

from typing import Any

import torch

from legato.model.process_group import ProcessGroup


class Group:
    """Takes what it is asked for. Attributes: `options`: of each exchange."""

    def __init__(self) -> None:
        self.options: list[Any] = []

    def allreduce(self, _values: object, options: Any) -> "Group":
        self.options.append(options)
        return self

    def gather(self, _parts: object, _values: object, options: Any) -> "Group":
        self.options.append(options)
        return self

    def wait(self) -> None:
        pass


def test_exchanges_are_queued_on_the_current_stream() -> None:
    """Not on another, which both would wait for."""
    for rank in range(2):
        ranks, group = ProcessGroup(rank, 2), Group()
        ranks._group = group
        ranks.sum(torch.ones(2))
        ranks.gather(torch.ones(1, 2))
        assert [options.asyncOp for options in group.options] == [False, False]
