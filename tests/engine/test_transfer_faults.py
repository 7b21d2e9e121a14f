"""Errors of one transfer: its request computes what it lacks, and other transfers go on."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from legato.core.config import SchedulerConfig
from legato.core.kv_transfer import BlocksArrived, FetchBlocks, SendBlocks
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AbortRequest, AddRequest
from legato.engine.loop.engine_loop import EngineLoop
from legato.engine.loop.transfers import Transfers
from legato.engine.loop.whole_transfers import WholeTransfers
from legato.executor.simulated import SimulatedExecutor, VirtualClock
from legato.kv.manager import KVCacheManager
from legato.kv.state_slots import StateSlots
from legato.scheduler.scheduler import Scheduler
from tests.engine.test_engine_loop import reasons, request, tokens, undisturbed

BLOCK_SIZE = 4
PROMPT = 22


class FakeTransport:
    """Another engine that has all blocks of all prompts, and reads all that it is offered.

    Attributes:
        fails: name of the method that raises for requests or transfers whose name says so.
        offered: key a transfer id, value the number of blocks; -1 for a transfer that was given up.
    """

    port = 1

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.offered: dict[str, int] = {}
        self.exports = self
        self.num_expired = 0
        self.has_released = False
        self.link = SimpleNamespace(num_bytes=0, busy_s=0.0)
        self._arrived: list[BlocksArrived] = []
        self._done: set[str] = set()

    def _raise_in(self, method: str, name: str) -> None:
        if method == self.fails and name.startswith("poison"):
            raise RuntimeError(name)

    @property
    def has_arrived(self) -> bool:
        return bool(self._arrived)

    def fetch(self, request_id: str, _: Any, blocks: Sequence[int], **more: Any) -> None:
        self._raise_in("fetch", request_id)
        num_tokens = more["start"] + BLOCK_SIZE * len(blocks)
        self._arrived.append(
            BlocksArrived(request_id=request_id, num_tokens=num_tokens, is_over=True)
        )

    def decline(self, source: FetchBlocks, _: bytes) -> None:
        self._raise_in("decline", source.transfer_id)

    def take_arrived(self) -> list[BlocksArrived]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def take_stuck(self) -> list[Any]:
        return []

    def take_released(self) -> list[str]:
        self.has_released = False
        released, self._done = [*self._done], set()
        return released

    def begin(self, transfer_id: str, _: bytes) -> bool:
        self._raise_in("begin", transfer_id)
        self.offered[transfer_id] = 0
        return True

    def grow(self, transfer_id: str, blocks: Sequence[int]) -> None:
        self._raise_in("grow", transfer_id)
        self.offered[transfer_id] += len(blocks)

    def complete(self, transfer_id: str) -> None:
        self._raise_in("complete", transfer_id)
        self._done.add(transfer_id)
        self.has_released = True

    def give_up(self, transfer_id: str) -> None:
        self.offered[transfer_id] = -1
        self._done.add(transfer_id)
        self.has_released = True


def engine(fails: str, *, whole: bool) -> tuple[EngineLoop, FakeTransport]:
    states = None
    if whole:
        states = StateSlots(8, 1, block_size=BLOCK_SIZE, num_spare_slots=16, unit=4, spacing=4)
    kv = KVCacheManager(100, BLOCK_SIZE, states=states)
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8).resolve(100)
    clock, transport = VirtualClock(), FakeTransport(fails)
    kind = WholeTransfers if whole else Transfers
    loop = EngineLoop(
        Scheduler(config, max_model_len=100, kv=kv),
        kv,
        SimulatedExecutor(clock, lambda _: 0.01),
        clock,
        transfers=kind(kv, transport),  # type: ignore[arg-type]
    )
    return loop, transport


def fetching(name: str) -> AddRequest:
    transfer = FetchBlocks(name, "127.0.0.1", 1)
    return msgspec.structs.replace(request(name, PROMPT), kv_transfer=transfer)


def sending(name: str) -> AddRequest:
    return msgspec.structs.replace(request(name, PROMPT), kv_transfer=SendBlocks(name))


def run(loop: EngineLoop, *events: AddRequest | AbortRequest) -> list[RequestOutput]:
    outputs = loop.step(events)
    for _ in range(100):
        outputs += loop.step()
    assert not loop.has_work
    return outputs


def check(loop: EngineLoop, outputs: list[RequestOutput], names: Sequence[str]) -> None:
    assert reasons(outputs) == dict.fromkeys(names, FinishReason.LENGTH)
    for name in names:
        assert tokens(outputs, name) == undisturbed(name, PROMPT)
    assert loop.stats.num_contained_errors == 1
    assert loop.stats.kv_usage == 0.0
    assert loop.transfers is not None
    assert not loop.transfers.is_waiting


@pytest.mark.parametrize("whole", [False, True])
def test_a_fetch_that_does_not_begin_is_computed(*, whole: bool) -> None:
    loop, _ = engine("fetch", whole=whole)
    names = ["a", "poison", "b"]
    outputs = run(loop, *map(fetching, names))
    check(loop, outputs, names)
    assert loop.stats.transfer is not None
    assert loop.stats.transfer.num_fetched == 2


@pytest.mark.parametrize("whole", [False, True])
def test_an_arrival_that_raises_keeps_no_other_request_waiting(
    monkeypatch: pytest.MonkeyPatch, *, whole: bool
) -> None:
    loop, _ = engine("", whole=whole)
    assert loop.transfers is not None
    real = loop.transfers._note_fetched

    def raising(fetched: Any) -> None:
        if fetched.request_id == "poison":
            raise RuntimeError("no record")
        real(fetched)

    monkeypatch.setattr(loop.transfers, "_note_fetched", raising)
    names = ["poison", "a", "b"]
    check(loop, run(loop, *map(fetching, names)), names)


@pytest.mark.parametrize("fails", ["begin", "grow", "complete"])
def test_an_offer_that_raises_leaves_others_offered(fails: str) -> None:
    loop, transport = engine(fails, whole=False)
    names = ["a", "poison", "b"]
    outputs = run(loop, *map(sending, names))
    if fails == "complete":  # its lease ends it
        transport.give_up("poison")
        outputs += run(loop)
    check(loop, outputs, names)


def test_a_request_that_failed_while_its_prompt_was_fetched_does_not_begin() -> None:
    loop, _ = engine("", whole=True)
    outputs = loop.step([fetching("a")])
    outputs += [loop.fail("a", RuntimeError("elsewhere"))]
    outputs += run(loop, fetching("b"))
    assert reasons(outputs) == {"a": FinishReason.ERROR, "b": FinishReason.LENGTH}
    assert loop.stats.kv_usage == 0.0
