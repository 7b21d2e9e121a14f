"""The load generator against real servers: well, overloaded and dying."""

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from legato.core.errors import ConfigError
from legato_lab.load.client import Address, ServedModel, connect
from legato_lab.load.open_loop import StopWhen, send_workload, warm_up
from legato_lab.simulation.record import OnProgress, RequestRecord, Status
from legato_lab.simulation.workload import RandomPrompts, Workload, WorkloadRequest
from tests.api.launch import MODEL, ServerProcess, running_server


def send(
    address: Address,
    workload: Workload,
    *,
    max_concurrency: int | None = None,
    on_progress: OnProgress | None = None,
    until_s: float = math.inf,
    stop_when: StopWhen | None = None,
) -> list[RequestRecord]:
    async def run() -> list[RequestRecord]:
        async with connect(address) as client:
            return await send_workload(
                client,
                workload,
                RandomPrompts(vocab_size=32_000, seed=0),
                max_concurrency=max_concurrency,
                on_progress=on_progress,
                until_s=until_s,
                stop_when=stop_when,
            )

    return asyncio.run(run())


def test_every_token_of_every_request_is_noted(address: Address) -> None:
    workload = [
        WorkloadRequest(0.0, 20, 30),
        WorkloadRequest(0.1, 300, 1),
        WorkloadRequest(0.2, 7, 12, "batch", -1),
    ]
    records = send(address, workload)
    assert [record.request for record in records] == workload
    for record in records:
        assert record.status == "ok", record.error
        assert record.num_tokens == record.request.num_output_tokens
        assert len(record.token_times_s) == record.num_tokens
        assert record.token_times_s == sorted(record.token_times_s)
        assert record.request.arrival_s <= record.sent_s < record.token_times_s[0]


def test_prompts_share_what_the_workload_says_and_nothing_with_another_run(
    address: Address,
) -> None:
    sharing = [WorkloadRequest(0.0, 700, 2, hash_ids=(3, place)) for place in (0, 1)]
    for _ in range(2):
        records = send(address, [*sharing, WorkloadRequest(0.0, 700, 2)], max_concurrency=1)
        assert [record.num_cached_tokens for record in records] == [0, 512, 0]


def test_sending_does_not_wait_for_answers(address: Address) -> None:
    """Each request has far more tokens to come than there is time until the last is sent."""
    told: list[Counter[Status]] = []
    records = send(
        address,
        [WorkloadRequest(0.1 * index, 10, 2000) for index in range(4)],
        on_progress=told.append,
        stop_when=lambda _now_s, records: len(records) == 4,
    )
    assert [record.status for record in records] == ["cancelled"] * 4
    assert told[-1] == {"cancelled": 4}


def test_a_run_ends_when_it_is_to(address: Address) -> None:
    workload = [WorkloadRequest(0.0, 10, 1), WorkloadRequest(0.1, 10, 2000)]
    records = send(address, [*workload, WorkloadRequest(60.0, 10, 1)], until_s=2.0)
    assert [record.status for record in records] == ["ok", "cancelled"]


def test_closed_loop(address: Address) -> None:
    records = send(address, [WorkloadRequest(0.0, 10, 5)] * 5, max_concurrency=1)
    assert [record.status for record in records] == ["ok"] * 5
    for before, after in itertools.pairwise(records):
        assert before.token_times_s[-1] <= after.request.arrival_s <= after.sent_s


def test_a_run_can_be_stopped(address: Address, server: ServerProcess) -> None:
    workload = [WorkloadRequest(0.0, 10, 5), WorkloadRequest(0.0, 10, 2000),
                WorkloadRequest(3600.0, 10, 5)]  # fmt: skip

    def first_has_ended(_now_s: float, records: Sequence[RequestRecord]) -> bool:
        return records[0].status == "ok"

    records = send(address, workload, stop_when=first_has_ended)
    assert [record.status for record in records] == ["ok", "cancelled"]
    server.wait_for_metric("num_requests_running", 0)


def test_requests_that_cannot_be_served_are_recorded(address: Address) -> None:
    [good, long] = send(address, [WorkloadRequest(0.0, 10, 2), WorkloadRequest(0.0, 3000, 2)])
    assert good.status == "ok"
    assert long.status == "error"
    assert long.error is not None
    assert long.error.startswith("400: ")
    assert long.ttft_s is None


def test_a_server_that_refuses_and_then_dies(tmp_path: Path) -> None:
    with running_server(tmp_path, "--max-num-seqs", "1", "--max-waiting", "1") as server:
        address = Address(base_url=server.url + "/v1/")
        _check_refusals(send(address, [WorkloadRequest(0.0, 20, 10)] * 12))

        def kill_once_it_streams(_now_s: float, records: Sequence[RequestRecord]) -> bool:
            if records[0].token_times_s:
                server.process.kill()
            return False

        workload = [WorkloadRequest(0.0, 10, 2000)]
        [record] = send(address, workload, stop_when=kill_once_it_streams)
        assert record.status == "error"
        assert 0 < record.num_tokens < 2000
        with pytest.raises(ConfigError, match="no OpenAI-compatible server at http://127"):
            send(address, workload)


def _check_refusals(records: list[RequestRecord]) -> None:
    assert {record.status for record in records} == {"ok", "refused"}
    for record in records:
        if record.status == "refused":
            assert record.retry_after_s is not None
            assert record.retry_after_s >= 1.0
            assert record.token_times_s == []


def test_the_model_is_asked_for(server: ServerProcess, address: Address) -> None:
    async def model(address: Address) -> ServedModel:
        async with connect(address) as client:
            return client.model

    assert asyncio.run(model(address)) == ServedModel(MODEL, 2048, 49_152)
    for wrong, message in (
        (Address(base_url=server.url, model="other", api_key="secret"), MODEL),
        (Address(base_url=server.url), "401"),
        (Address(base_url="127.0.0.1:1"), "no OpenAI-compatible server"),
        (Address(base_url="http://[::"), "is not a URL"),
        (Address(base_url=f"{server.url}/metrics", api_key="secret"), "404"),
    ):
        with pytest.raises(ConfigError, match=message):
            asyncio.run(model(wrong))


def test_warm_up_serves_the_extremes(address: Address, server: ServerProcess) -> None:
    async def run() -> None:
        async with connect(address) as client:
            workload = [WorkloadRequest(0.0, length, 50) for length in (30, 500, 100)]
            await warm_up(client, workload, RandomPrompts(vocab_size=32_000, seed=1))

    before = server.metric("prompt_tokens_total")
    asyncio.run(run())
    assert server.metric("prompt_tokens_total") - before == 530


def test_prompts_never_repeat() -> None:
    """Not even their beginnings do, in a later run with the same seed."""
    prompts, again = (RandomPrompts(vocab_size=1200, seed=3) for _ in range(2))
    drawn, drawn_again = ([p.draw(50) for _ in range(20)] for p in (prompts, again))
    assert [prompt[4:] for prompt in drawn] == [prompt[4:] for prompt in drawn_again]
    assert len({tuple(prompt[:4]) for prompt in drawn + drawn_again}) == 40
    with pytest.raises(ConfigError, match="vocab_size"):
        RandomPrompts(vocab_size=1000, seed=0)
    assert {1000 <= token < 1200 for prompt in drawn for token in prompt} == {True}
