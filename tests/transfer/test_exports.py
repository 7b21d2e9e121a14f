"""What an exporting engine does for fetches that wait grows with the prompts that change."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from legato.transfer.exports import Exports, Offer
from legato.transfer.mover import TransferError
from legato.transfer.protocol import Ask
from legato.transfer.service import ExportService

LONG_S = 30.0
NAMES = [str(i) for i in range(20)]


class CountedExports(Exports):
    """Records the prompts that are asked for."""

    def __init__(self) -> None:
        super().__init__(lease_s=LONG_S)
        self.asked: list[str] = []

    def ask(self, transfer_id: str, prompt_digest: bytes, num_known: int) -> Offer | None:
        self.asked.append(transfer_id)
        return super().ask(transfer_id, prompt_digest, num_known)


class StillMover:
    def progress(self) -> None:
        """There is nothing to do."""


def service_of(exports: Exports) -> ExportService:
    mover: Any = StillMover()
    memory: Any = None
    return ExportService(exports, mover, memory, {}, b"key")


@pytest.fixture
async def service() -> AsyncIterator[ExportService]:
    """Serves twenty prompts without a computed block."""
    exports = CountedExports()
    for name in NAMES:
        exports.begin(name, b"digest")
    service = service_of(exports)
    service._num_connections = 1
    service._begin_progress()
    yield service
    service._num_connections = 0
    assert service._progress is not None
    await service._progress


def waiting(service: ExportService, name: str, num_known: int = 0) -> "asyncio.Task[Offer | None]":
    return asyncio.create_task(service._offer(Ask(name, b"digest", num_known), LONG_S))


async def test_an_answer_that_waits_looks_only_when_its_prompt_changes(
    service: ExportService,
) -> None:
    exports = service._exports
    assert isinstance(exports, CountedExports)
    answers = {name: waiting(service, name) for name in NAMES}
    second = waiting(service, "3")
    await asyncio.sleep(0.02)
    assert sorted(exports.asked) == sorted([*NAMES, "3"])
    exports.asked.clear()
    exports.grow("3", [7, 8])
    for answer in (answers.pop("3"), second):
        assert await asyncio.wait_for(answer, LONG_S) == Offer([7, 8], is_complete=False)
    later = waiting(service, "3", 2)
    exports.complete("5")
    assert await asyncio.wait_for(answers.pop("5"), LONG_S) == Offer([], is_complete=True)
    exports.give_up("6")
    exports.release("7")
    assert await asyncio.wait_for(answers.pop("6"), LONG_S) is None
    assert await asyncio.wait_for(answers.pop("7"), LONG_S) is None
    assert exports.asked == ["3", "3", "3", "5", "6", "7"]
    exports.grow("3", [9])
    assert await asyncio.wait_for(later, LONG_S) == Offer([9], is_complete=False)
    for answer in answers.values():
        answer.cancel()
    for name in answers:
        exports.give_up(name)
    await asyncio.sleep(0.02)
    assert not exports._awaited
    assert not service._changes


async def test_an_answer_without_news_comes_after_its_wait(service: ExportService) -> None:
    assert await service._offer(Ask("1", b"digest", 0), 0.001) == Offer([], is_complete=False)
    answer = waiting(service, "1")
    await asyncio.sleep(0)
    service._exports.grow("1", [4])
    assert await asyncio.wait_for(answer, LONG_S) == Offer([4], is_complete=False)


async def test_a_prompt_that_changes_twice_between_two_looks_stops_no_answer(
    service: ExportService,
) -> None:
    exports = service._exports
    short = asyncio.create_task(service._offer(Ask("1", b"digest", 0), 0.001))
    assert await short == Offer([], is_complete=False)
    exports.grow("1", [4])
    assert exports.ask("1", b"digest", 0) == Offer([4], is_complete=False)
    later = waiting(service, "1", 1)
    real, exports.take_changed = exports.take_changed, list  # type: ignore[method-assign]
    await asyncio.sleep(0)
    exports.grow("1", [5])
    exports.take_changed = real  # type: ignore[method-assign]
    assert await asyncio.wait_for(later, LONG_S) == Offer([5], is_complete=False)
    after = waiting(service, "2")
    await asyncio.sleep(0)
    exports.grow("2", [6])
    assert await asyncio.wait_for(after, LONG_S) == Offer([6], is_complete=False)


async def test_a_fetch_without_news_asks_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service, waits = service_of(Exports(LONG_S)), list[float]()
    news = iter([True, False, False, False, False, False, True, False])

    async def answer(_: object, wait_s: float) -> bool:
        waits.append(wait_s)
        for has_news in news:
            return has_news
        raise TransferError("it is gone")

    async def welcome(_: object) -> bool:
        return True

    monkeypatch.setattr(service, "_answer", answer)
    monkeypatch.setattr(service, "_welcome", welcome)
    reader, writer = asyncio.StreamReader(), ClosableWriter()
    await service.serve(reader, writer)  # type: ignore[arg-type]
    assert waits == pytest.approx([0.1, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 0.1, 0.2])


class ClosableWriter:
    def close(self) -> None:
        """Nothing was written."""


class Unread(dict[str, Any]):
    """Knows its entries by key, and cannot be iterated over."""

    def __iter__(self) -> Any:
        raise AssertionError("all prompts are looked at")

    keys = values = items = __iter__


def test_leases_are_looked_at_as_they_end() -> None:
    now_s = 0.0
    exports = Exports(10.0, clock=lambda: now_s)
    exports._exports = Unread()
    for name in NAMES:
        exports.begin(name, b"digest")
    for name in NAMES[:4]:
        exports.complete(name)
        now_s += 1.0
    assert exports.ask("0", b"digest", 0) is not None, "which renews its lease"
    exports.release("1")
    assert exports.take_released() == ["1"]
    now_s = 12.5
    assert exports.has_released
    assert exports.take_released() == ["2"]
    assert not exports.has_released
    now_s = 100.0
    assert exports.take_released() == ["3", "0"]
    assert exports.num_expired == 3
    assert len(exports._exports) == len(NAMES) - 4
