"""The cost of planning a step grows with what is in the step, not with the length of the queue."""

import gc
from collections import Counter, OrderedDict
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any

import pytest
from sortedcontainers import SortedKeyList

from legato.core.request import Request
from legato.scheduler import fair_queue, queues
from legato.scheduler.order import ORDERS
from tests.scheduler.drafters import RandomDrafter
from tests.scheduler.harness import VOCAB_SIZE, Harness, coming

LOOKS: Counter[str] = Counter()
"""Key what was looked at: an attribute of a request, or the queue; value how often."""


class CountedValues(ValuesView[Any]):
    def __reversed__(self) -> Iterator[Any]:
        return (self._mapping[key] for key in reversed(self._mapping))  # type: ignore[attr-defined]


class CountedDict(OrderedDict[str, Request]):
    """Counts the entries that iterations of any kind visit."""

    def __iter__(self) -> Iterator[str]:
        return counted(super().__iter__())

    def __reversed__(self) -> Iterator[str]:
        return counted(super().__reversed__())

    def keys(self) -> Any:
        return KeysView(self)

    def values(self) -> Any:
        return CountedValues(self)

    def items(self) -> Any:
        return ItemsView(self)

    def copy(self) -> "CountedDict":
        return CountedDict(self)

    __copy__ = copy


class CountedList(SortedKeyList):  # type: ignore[misc]
    """Counts each request that is handed out."""

    def __iter__(self) -> Iterator[Request]:
        return counted(super().__iter__())

    def __reversed__(self) -> Iterator[Request]:
        return counted(super().__reversed__())

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        LOOKS["queue"] += len(found) if isinstance(index, slice) else 1
        return found

    def islice(self, *args: Any, **kwargs: Any) -> Iterator[Request]:
        return counted(super().islice(*args, **kwargs))

    def irange_key(self, *args: Any, **kwargs: Any) -> Iterator[Request]:
        return counted(super().irange_key(*args, **kwargs))

    _irange_key = irange_key  # by which `irange` calls it


def counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        LOOKS["queue"] += 1
        yield item


@pytest.fixture(autouse=True)
def _count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count what is looked at in the queues, and in the requests wherever they are kept."""
    monkeypatch.setattr(queues, "OrderedDict", CountedDict)
    monkeypatch.setattr(fair_queue, "SortedKeyList", CountedList)

    def read(request: Request, name: str) -> Any:
        LOOKS[name] += 1
        return object.__getattribute__(request, name)

    def equals(request: Request, other: object) -> bool:
        LOOKS["equality"] += 1
        return request is other

    def hash_of(request: Request) -> int:
        LOOKS["hash"] += 1
        return id(request)

    monkeypatch.setattr(Request, "__getattribute__", read)
    monkeypatch.setattr(Request, "__eq__", equals)
    monkeypatch.setattr(Request, "__hash__", hash_of)


def harness_with(num_waiting: int, **settings: Any) -> Harness:
    harness = Harness(budget=8, max_num_seqs=4, max_waiting=20_000, **settings)
    scheduler = harness.scheduler
    scheduler._requests = scheduler.replanning._requests = CountedDict()
    for i in range(num_waiting):
        harness.clock.advance_to(0.0001 * i)
        harness.add(str(i), 6)
    return harness


def looks(num_waiting: int, **settings: Any) -> Counter[str]:
    """Entries that ten steps look at while so many requests wait."""
    harness = harness_with(num_waiting, **settings)
    LOOKS.clear()
    for _ in range(10):
        harness.step()
        assert harness.scheduler.stats.num_waiting
    return LOOKS.copy()


@pytest.mark.parametrize("promise", [{}, {"ttft_slo_s": 1000.0}, {"itl_slo_s": 1.0}], ids=str)
@pytest.mark.parametrize("order", ORDERS)
def test_planning_does_not_look_at_the_whole_queue(order: str, promise: dict[str, float]) -> None:
    settings = {"prefill_order": order, **promise}
    assert looks(10_000, **settings) == looks(20, **settings)


@pytest.mark.parametrize("speculative", ["auto", 4])
def test_nor_does_drafting(speculative: int | str) -> None:
    def looks_among(num_waiting: int) -> Counter[str]:
        drafter = RandomDrafter(coming, vocab_size=VOCAB_SIZE)
        found = looks(num_waiting, drafters=[drafter], speculative=speculative)
        assert drafter.num_told
        return found

    assert looks_among(10_000) == looks_among(20)


def test_the_queue_is_kept_in_nothing_that_does_not_count() -> None:
    scheduler = harness_with(20).scheduler
    held = scheduler._queues
    parts = [part for queue in held._fair._by_tenant.values() for part in queue._lists]
    holders = gc.get_referrers(held.get("19"))
    assert {*map(id, holders)} <= {*map(id, [held._waiting, scheduler._requests, *parts])}
