"""One engine computes prompts and another continues them, both in this process."""

import asyncio
import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import LlamaConfig

from legato.core.cache_config import TransferConfig
from legato.core.kv_transfer import FetchBlocks, SendBlocks
from legato.core.outputs import FinishReason
from legato.core.request import AbortRequest
from legato.core.step_record import BlocksFetched
from legato.engine.build import transfers
from legato.transfer import fetch, transport
from legato.transfer.block_memory import CacheMemory, Spans
from legato.transfer.mover import Mover, ReadState
from legato.transfer.protocol import (
    Challenge,
    Connection,
    FromExporter,
    Hello,
    TransferRefusal,
    new_nonce,
)
from tests.checkpoint.test_dummy import described
from tests.engine.peers import (
    LEASE_S,
    PROMPT,
    Engine,
    asked,
    completions,
    expected,
    fetched,
    run,
    sent,
    transferred,
)
from tests.model.conftest import TINY
from tests.transfer.local_mover import LocalMover


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return described(
        tmp_path_factory.mktemp("model"),
        LlamaConfig(**TINY | {"max_position_embeddings": 512}),
        dtype="float32",
    )


@pytest.fixture
def prefill(model: Path) -> Iterator[Engine]:
    with closing(Engine(model)) as engine:
        yield engine


@pytest.fixture
def decode(model: Path) -> Iterator[Engine]:
    with closing(Engine(model)) as engine:
        yield engine


@pytest.fixture
def patient(model: Path) -> Iterator[Engine]:
    """An engine whose leases no test outlives."""
    with closing(Engine(model, kv_lease_s=30.0)) as engine:
        yield engine


def test_a_prompt_computed_elsewhere_goes_on_as_if_it_had_been_computed_here(
    model: Path, prefill: Engine, decode: Engine
) -> None:
    prefill.go(sent("a"))
    run(prefill, until=lambda: prefill.end("a") is not None)
    assert not prefill.is_clean, "it is kept"
    assert transferred(prefill).num_leases == 1
    decode.set_recording(is_on=True)
    decode.go(fetched("a", prefill))
    run(prefill, decode, until=lambda: decode.end("a") is not None)
    assert decode.tokens("a") == expected(model)
    last = decode.end("a")
    assert last is not None
    assert last.num_cached_tokens == 288, "18 of 19 blocks"
    told = transferred(decode)
    assert (told.num_fetched, told.num_recomputed) == (1, 0)
    assert told.num_bytes == 288 * decode.token_bytes
    assert told.read_s > 0.0
    [record] = [r for r in decode.take_records() if isinstance(r, BlocksFetched)]
    assert (record.num_tokens, record.num_wanted_tokens) == (288, 288)
    assert record.begun_s < record.ended_s
    run(prefill, decode, until=lambda: prefill.is_clean and decode.is_clean)


def test_blocks_come_while_the_prompt_is_computed(prefill: Engine, decode: Engine) -> None:
    """The engine that fetches hears of the prompt first."""
    decode.go(fetched("a", prefill, is_early=True))
    run(decode, until=lambda: not decode.has_work)
    seen: set[int] = set()

    def look() -> bool:
        [*holds] = decode.kv.holds
        seen.update(hold.num_computed_tokens for hold in holds)
        return decode.end("a") is not None

    prefill.go(sent("a"))
    while prefill.end("a") is None:
        prefill.go()
        for _ in range(10):
            if decode.has_work:
                decode.go()
            look()
            time.sleep(0.002)
    run(prefill, decode, until=look)
    assert len(seen - {0, 288}) > 2, seen
    run(prefill, decode, until=lambda: prefill.is_clean and decode.is_clean)


def test_only_what_is_not_cached_is_fetched(model: Path, prefill: Engine, decode: Engine) -> None:
    decode.go(asked("before", PROMPT[:100]))
    prefill.go(sent("a"))
    run(prefill, decode, until=lambda: None not in (prefill.end("a"), decode.end("before")))
    decode.go(fetched("a", prefill))
    [hold] = decode.kv.holds
    assert (hold.start, hold.end) == (96, 288)
    run(prefill, decode, until=lambda: decode.end("a") is not None)
    assert decode.tokens("a") == expected(model)
    run(prefill, decode, until=lambda: prefill.is_clean and decode.is_clean)


def test_two_that_begin_alike_each_fetch_their_own_part(
    model: Path, prefill: Engine, decode: Engine
) -> None:
    prompts = {"a": PROMPT, "b": PROMPT[:200] + [1] * 60, "c": PROMPT}
    for request_id, prompt in prompts.items():
        prefill.go(sent(request_id, prompt))
    run(prefill, until=lambda: all(map(prefill.end, prompts)))
    for request_id, prompt in prompts.items():
        decode.go(fetched(request_id, prefill, prompt))
    run(prefill, decode, until=lambda: all(map(decode.end, prompts)))
    for request_id, prompt in prompts.items():
        assert decode.tokens(request_id) == expected(model, prompt)
    run(prefill, decode, until=lambda: prefill.is_clean and decode.is_clean)


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_all_completions_of_a_prompt_have_what_one_fetches(
    model: Path,
    patient: Engine,
    decode: Engine,
    count: int,
    is_early: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetch, "_MOST_BYTES", 2 * 16 * decode.token_bytes)
    events = completions(patient, count, is_early=is_early)
    if is_early:
        decode.go(*events)
        run(decode, until=lambda: not decode.has_work)
    patient.go(sent("a"))
    run(patient, until=lambda: patient.end("a") is not None)
    if not is_early:
        decode.go(*events)
    run(patient, decode, until=lambda: all(decode.end(event.request_id) for event in events))
    run(patient, decode, until=lambda: patient.is_clean and decode.is_clean)
    told = transferred(decode)
    assert told.num_bytes == 288 * decode.token_bytes
    assert (told.num_fetched, told.num_recomputed) == (count, 0)
    assert transferred(patient).num_expired == 0
    assert [decode.tokens(event.request_id) for event in events] == [expected(model)] * count


@pytest.mark.parametrize("aborted", [0, 1])
@pytest.mark.parametrize("is_admitted", [False, True])
def test_a_completion_that_is_aborted_is_done_and_the_others_fetch(
    model: Path, patient: Engine, aborted: int, is_admitted: bool
) -> None:
    with closing(Engine(model, max_num_seqs=4 if is_admitted else 1, kv_lease_s=30.0)) as decode:
        events = completions(patient, 2, is_early=True)
        decode.go(*events)
        decode.go(AbortRequest(request_id=f"a-{aborted}"))
        patient.go(sent("a"))
        run(patient, until=lambda: patient.end("a") is not None)
        run(patient, decode, until=lambda: all(decode.end(event.request_id) for event in events))
        assert decode.tokens(f"a-{1 - aborted}") == expected(model)
        run(patient, decode, until=lambda: patient.is_clean and decode.is_clean)
        assert transferred(decode).num_bytes == 288 * decode.token_bytes
        assert transferred(patient).num_expired == 0


def test_a_decode_that_dies_between_completions_leaves_nothing_behind(
    model: Path, prefill: Engine
) -> None:
    prefill.go(sent("a"))
    run(prefill, until=lambda: prefill.end("a") is not None)
    with closing(Engine(model)) as decode:
        first, _ = completions(prefill, 2)
        decode.go(first)
        run(decode, until=lambda: decode.end("a-0") is not None)
        prefill.go()
        assert transferred(prefill).num_leases == 1, "it is kept for the other"
    run(prefill, until=lambda: prefill.is_clean)
    assert transferred(prefill).num_expired == 1


def test_where_nobody_answers_the_prompt_is_computed(model: Path, decode: Engine) -> None:
    with closing(Engine(model)) as gone:
        pass
    decode.go(fetched("a", gone))
    run(decode, until=lambda: decode.end("a") is not None)
    assert decode.tokens("a") == expected(model)
    assert decode.is_clean


def test_what_nobody_keeps_is_computed(model: Path, prefill: Engine, decode: Engine) -> None:
    decode.go(fetched("a", prefill))
    run(decode, until=lambda: decode.end("a") is not None)
    assert decode.tokens("a") == expected(model)
    assert decode.is_clean


def test_another_prompts_blocks_are_not_taken(model: Path, prefill: Engine, decode: Engine) -> None:
    """Or a client that knows a name could have what follows it be computed from something else."""
    other = [1] * 300
    prefill.go(sent("a"))
    run(prefill, until=lambda: prefill.end("a") is not None)
    decode.go(fetched("a", prefill, other))
    run(prefill, decode, until=lambda: decode.end("a") is not None)
    assert decode.tokens("a") == expected(model, other)
    assert decode.end("a").num_cached_tokens == 0  # type: ignore[union-attr]


def test_a_prefill_that_dies_half_way_costs_what_was_not_read(
    model: Path, prefill: Engine, decode: Engine
) -> None:
    decode.go(fetched("a", prefill, is_early=True))
    prefill.go(sent("a"))
    for _ in range(4):
        prefill.go()
    run(decode, until=lambda: decode.kv.holds["a"].num_computed_tokens > 0)
    prefill.close()
    run(decode, until=lambda: decode.end("a") is not None)
    assert decode.tokens("a") == expected(model)
    last = decode.end("a")
    assert last is not None
    assert 0 < last.num_cached_tokens < 288
    assert transferred(decode).num_recomputed == 1
    assert decode.is_clean


class StuckRead:
    """A read that neither ends nor can be stopped, until it is freed, and writes then."""

    def __init__(self, write: Callable[[], object]) -> None:
        self.is_freed = False
        self._write = write

    def state(self) -> ReadState:
        if not self.is_freed:
            return "running"
        self._write()
        return "done"

    def cancel(self) -> bool:
        return False


class StuckMover(LocalMover):
    """A mover whose reads are stuck after the first."""

    reads: list[StuckRead]

    def read(self, peer: str, spans: Spans, gpu: int | None) -> Any:
        self.reads = getattr(self, "reads", [])
        if not self.reads:
            self.reads.append(StuckRead(lambda: None))
            return super().read(peer, spans, gpu)
        here = spans[:, 0].tolist(), spans[:, 2].tolist()

        def write() -> None:
            for address, num_bytes in zip(*here, strict=True):
                ctypes.memset(address, 0x7F, num_bytes)

        self.reads.append(StuckRead(write))
        return self.reads[-1]


@pytest.mark.parametrize("num_blocks", [32, 40, 300])
def test_a_read_that_never_ends_costs_a_computation(
    model: Path, patient: Engine, monkeypatch: pytest.MonkeyPatch, num_blocks: int
) -> None:
    """What it writes in the end harms no request. Without room for other blocks, it is awaited."""
    movers: list[StuckMover] = []

    def make_mover(_: TransferConfig, memory: CacheMemory) -> Mover:
        movers.append(StuckMover("stuck", memory))
        return movers[-1]

    monkeypatch.setattr(transport, "_STUCK_LOOK_S", 0.01)
    patient.go(sent("a"))
    run(patient, until=lambda: patient.end("a") is not None)
    room = {"kv_cache_memory_bytes": 12288 * num_blocks}
    with closing(Engine(model, make_mover, kv_lease_s=0.3, **room)) as decode:
        monkeypatch.setattr(fetch, "_MOST_BYTES", 2 * 16 * decode.token_bytes)
        decode.go(*completions(patient, 2))
        if num_blocks == 32:
            run(decode, until=lambda: bool(decode.transfers and decode.transfers._stuck))
            movers[0].reads[-1].is_freed = True
        run(decode, until=lambda: decode.end("a-0") is not None and decode.end("a-1") is not None)
        assert decode.tokens("a-0") == decode.tokens("a-1") == expected(model)
        assert transferred(decode).num_recomputed == 1
        if num_blocks > 32:
            assert not decode.is_clean, "blocks that may be written to are in quarantine"
        movers[0].reads[-1].is_freed = True
        run(decode, until=lambda: decode.is_clean)
        decode.go(asked("b"))
        run(decode, until=lambda: decode.end("b") is not None)
        assert decode.tokens("b") == expected(model)


def test_what_nobody_fetches_is_given_up_when_its_lease_ends(prefill: Engine) -> None:
    prefill.go(sent("a"))
    run(prefill, until=lambda: prefill.end("a") is not None)
    ended_s = time.monotonic()
    run(prefill, until=lambda: prefill.is_clean)
    assert time.monotonic() - ended_s >= 0.5 * LEASE_S
    told = transferred(prefill)
    assert (told.num_leases, told.num_expired) == (0, 1)


def test_a_decode_that_dies_half_way_leaves_nothing_behind(model: Path, prefill: Engine) -> None:
    with closing(Engine(model)) as decode:
        decode.go(fetched("a", prefill, is_early=True))
        prefill.go(sent("a"))
        for _ in range(4):
            prefill.go()
        run(decode, until=lambda: decode.kv.holds["a"].num_computed_tokens > 0)
    run(prefill, until=lambda: prefill.end("a") is not None)
    run(prefill, until=lambda: prefill.is_clean)


def test_a_prefill_that_is_aborted_lets_the_other_engine_compute(
    model: Path, prefill: Engine, decode: Engine
) -> None:
    decode.go(fetched("a", prefill, is_early=True))
    prefill.go(sent("a"))
    for _ in range(3):
        prefill.go()
    prefill.go(AbortRequest(request_id="a"))
    run(prefill, decode, until=lambda: decode.end("a") is not None)
    assert decode.tokens("a") == expected(model)
    run(prefill, decode, until=lambda: prefill.is_clean and decode.is_clean)


def test_a_request_that_is_aborted_while_its_blocks_arrive_leaves_nothing_behind(
    prefill: Engine, decode: Engine
) -> None:
    decode.go(fetched("a", prefill, is_early=True))
    prefill.go(sent("a"))
    decode.go(AbortRequest(request_id="a"))
    last = decode.end("a")
    assert last is not None
    assert last.finish_reason is FinishReason.ABORT
    run(prefill, decode, until=lambda: prefill.end("a") is not None)
    run(prefill, decode, until=lambda: prefill.is_clean and decode.is_clean)


def test_another_layout_is_refused(
    model: Path, prefill: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    prefill.go(sent("a"))
    run(prefill, until=lambda: prefill.end("a") is not None)
    with closing(Engine(model, block_size=32)) as decode:
        decode.go(fetched("a", prefill))
        run(decode, until=lambda: decode.end("a") is not None)
        assert decode.tokens("a") == expected(model)
    assert "--block-size is 16 here and not 32" in caplog.text


def test_blocks_of_another_form_of_8_bits_are_refused(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine from before heads were mixed calls its form int8."""
    settings = {"kv_cache_dtype": "int8"}
    with closing(Engine(model, **settings)) as prefill, monkeypatch.context() as older:
        older.setattr(transfers, "_form", lambda _: "int8")
        prefill.go(sent("a"))
        run(prefill, until=lambda: prefill.end("a") is not None)
        with closing(Engine(model, **settings)) as decode:
            decode.go(fetched("a", prefill))
            run(decode, until=lambda: decode.end("a") is not None)
            assert decode.tokens("a")
    assert "--kv-cache-dtype is int8 of mixed heads here and not int8" in caplog.text


def test_another_key_is_refused(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ports = []
    for name in ("one", "another"):
        (tmp_path / name).write_text(f"{name}, of sixteen bytes at least")
        ports.append({"kv_transfer_key_file": str(tmp_path / name)})
    with (
        closing(Engine(model, **ports[0])) as prefill,
        closing(Engine(model, **ports[1])) as decode,
    ):
        prefill.go(sent("a"))
        decode.go(fetched("a", prefill, is_early=True))
        run(prefill, decode, until=lambda: decode.end("a") is not None)
        assert decode.tokens("a") == expected(model)
    assert "the keys of the two engines differ" in caplog.text


@pytest.mark.parametrize(
    "said",
    [b"", b"\xff\xff\xff\x7f", b"\x03\x00\x00\x00abc", b"GET / HTTP/1.1\r\n\r\n"],
    ids=["nothing", "too long", "no message", "HTTP"],
)
def test_what_no_engine_says_harms_nobody(prefill: Engine, decode: Engine, said: bytes) -> None:
    async def speak() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", prefill.port)
        writer.write(said)
        await writer.drain()
        writer.close()

    asyncio.run(speak())
    prefill.go(sent("a"))
    decode.go(fetched("a", prefill, is_early=True))
    run(prefill, decode, until=lambda: decode.end("a") is not None)
    assert decode.end("a").num_cached_tokens == 288  # type: ignore[union-attr]


def test_copies_are_awaited_before_others_read_or_write_blocks(
    prefill: Engine, decode: Engine
) -> None:
    """On a GPU, they are only asked for when the executor was told to move."""
    awaited: list[str] = []
    for name, engine in (("prefill", prefill), ("decode", decode)):
        transfers, fetch = engine.transfers, engine.transfers._transport.fetch  # type: ignore[union-attr]
        assert transfers is not None
        transfers._await_copies = partial(awaited.append, name)

        def fetching(*args: Any, then: Any = fetch, **settings: Any) -> None:
            assert awaited == ["prefill", "decode"]
            then(*args, **settings)

        transfers._transport.fetch = fetching  # type: ignore[method-assign]
    prefill.go(asked("b", PROMPT[:20]))
    assert not awaited
    prefill.go(sent("a"))
    run(prefill, until=lambda: prefill.end("a") is not None)
    decode.go(fetched("a", prefill))
    run(prefill, decode, until=lambda: decode.end("a") is not None)
    assert awaited == ["prefill", "decode"]


def test_who_only_fetches_listens_nowhere(model: Path, prefill: Engine) -> None:
    with closing(Engine(model, kv_role="decode")) as decode:
        assert decode.port == 0
        decode.go(fetched("a", prefill, is_early=True))
        prefill.go(sent("a"))
        run(prefill, decode, until=lambda: decode.end("a") is not None)
        assert decode.end("a").num_cached_tokens == 288  # type: ignore[union-attr]


def test_who_does_not_show_the_key_is_told_nothing(prefill: Engine) -> None:
    async def greet() -> Any:
        streams = await asyncio.open_connection("127.0.0.1", prefill.port)
        connection = Connection(*streams, FromExporter, timeout_s=5.0)
        assert isinstance(await connection.receive(), Challenge)
        await connection.send(Hello(new_nonce(), b"guessed", prefill.layout))
        return await connection.receive()

    assert isinstance(asyncio.run(greet()), TransferRefusal)


def test_messages_to_the_engine_carry_it() -> None:
    for transfer in (SendBlocks("a"), FetchBlocks("a", "127.0.0.1", 1, True)):
        message = asked("a", kv_transfer=transfer).kv_transfer
        decoded = msgspec.msgpack.decode(
            msgspec.msgpack.encode(message), type=SendBlocks | FetchBlocks
        )
        assert decoded == transfer
