"""Ranks that fail at any place of what they do together, and go on together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.executor.ranks.agreement import Agreement, Exchange, FailedElsewhereError
from legato.model.communicator import Communicator
from tests.model.ranks import on_all_ranks
from tests.profiles import examples

SUM = Exchange("sum", (3, 2), torch.float32)
GATHER = Exchange("gather", (3, 5), torch.float32)


class BrokenError(Exception):
    pass


def exchanged(group: Communicator, exchange: Exchange) -> bool:
    """Whether the parts of all ranks came together."""
    values = torch.full(exchange.shape, 2.0**group.rank)
    found = getattr(group, exchange.kind)(values)
    if exchange.kind == "sum":
        return bool((found == 2**group.size - 1).all())
    columns = torch.tensor([2.0**rank for rank in range(group.size)]).repeat_interleave(5)
    return group.rank > 0 or bool((found == columns).all())


def attempts(
    group: Communicator, steps: list[list[Exchange]], failures: list[dict[int, int]]
) -> list[str]:
    """A rank's results of steps. In some of them, some ranks fail at some place."""
    agreement = Agreement(group)
    told = []
    for exchanges, fails_at in zip(steps, failures, strict=True):
        place = fails_at.get(group.rank)

        def compute(exchanges: list[Exchange] = exchanges, place: int | None = place) -> bool:
            are_whole = []
            for i, exchange in enumerate(exchanges):
                if i == place:
                    raise BrokenError
                are_whole.append(exchanged(agreement, exchange))
            if place is not None:
                raise BrokenError
            return all(are_whole)

        try:
            told.append(str(agreement.together(exchanges, compute)))
        except (BrokenError, FailedElsewhereError) as error:
            told.append(type(error).__name__)
    return told


@given(data=st.data(), size=st.integers(2, 3))
@examples(15)
def test_all_ranks_compute_or_none_does(data: st.DataObject, size: int) -> None:
    steps = data.draw(st.lists(st.lists(st.sampled_from([SUM, GATHER]), max_size=4), max_size=4))
    failing = st.dictionaries(st.integers(0, size - 1), st.integers(0, 5))
    failures = [data.draw(failing) for _ in steps]
    told = on_all_ranks(size, lambda group: attempts(group, steps, failures))
    for rank in range(size):
        for step, fails_at in enumerate(failures):
            wanted = "FailedElsewhereError" if fails_at else "True"
            assert told[rank][step] == ("BrokenError" if rank in fails_at else wanted)


def test_an_interrupt_is_no_failure_to_agree_on() -> None:
    class Nobody:
        rank, size = 0, 2

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Agreement(Nobody()).together([SUM], interrupted)  # type: ignore[arg-type]
