"""What a probe measures, by hand and on a real server."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from legato_lab.load.client import Address, connect
from legato_lab.probe import Probe, ProbeResult
from legato_lab.simulation.record import RequestError
from tests.api.launch import ServerProcess, running_server
from tests.api.servers import DRAFTING, Servers

RESULT = ProbeResult(
    token_times_s=[[-4.0, -2.0, -1.0, 0.5, 3.5, 4.0], [-2.5, 0.0, 2.0, 2.5, 9.0]],
    window_start_s=-2.0,
    long_ttfts_s=[1.5, 3.0],
)


def test_windows_by_hand() -> None:
    assert RESULT.ttft_s == 3.0
    assert RESULT.itl_s(during=False).tolist() == [1.0]
    assert RESULT.itl_s(during=True).tolist() == [1.5, 3.0, 2.0, 0.5, 6.5]
    assert RESULT.tokens_per_s(during=False) == 1.0  # at -1.0 and 0.0
    assert RESULT.tokens_per_s(during=True) == pytest.approx(1.0)  # at 0.5, 2.0 and 2.5


def test_tokens_that_come_at_once_count_and_have_no_gap() -> None:
    counts = [[1, 1, 3, 4, 1, 1], [1, 5, 2, 1, 9]]
    result = msgspec.structs.replace(RESULT, token_counts=counts)
    assert result.itl_s(during=True).tolist() == RESULT.itl_s(during=True).tolist()
    assert result.tokens_per_s(during=False) == 4.0  # 3 and 5 in 2 s
    assert result.tokens_per_s(during=True) == pytest.approx((4 + 2 + 1) / 3)


def test_a_server_that_drafts_says_how_many_tokens_came(servers: Servers) -> None:
    async def complete(url: str) -> tuple[list[int], int]:
        async with connect(Address(base_url=url)) as client:
            counts, times_s = list[int](), list[float]()
            completed = await client.complete(
                [500, 501, 502, 503] * 16, 60, times_s, token_counts=counts
            )
            assert len(times_s) == len(counts)
            return counts, completed.num_tokens

    counts, num_tokens = asyncio.run(complete(servers.get(*DRAFTING).url))
    assert sum(counts) == num_tokens == 60
    assert max(counts) > 1


def test_probe_of_a_server(address: Address, server: ServerProcess) -> None:
    """The long prompt, which the warm-up sends, too, is as long as the context allows."""
    before = server.metric("prompt_tokens_total")
    probe = Probe(
        address.base_url,
        num_streams=3,
        slo_classes=("interactive", "batch"),
        steady_s=0.5,
        api_key=address.api_key,
    )
    result = asyncio.run(probe.run())
    assert server.metric("prompt_tokens_total") - before == 16 + 3 * 64 + 2 * 2046
    assert len(result.token_times_s) == 3
    assert list(map(len, result.token_counts)) == list(map(len, result.token_times_s))
    assert len(result.long_ttfts_s) == 1
    assert all(times_s == sorted(times_s) for times_s in result.token_times_s)
    assert result.window_start_s <= -0.5
    for during in (False, True):
        assert result.itl_s(during=during).size >= 3
        assert result.itl_s(during=during, streams=slice(1, None, 2)).size >= 1
        assert result.tokens_per_s(during=during) > 0.0


def test_streams_that_end_too_early(tmp_path: Path) -> None:
    with running_server(tmp_path, "--max-model-len", "90") as server:
        probe = Probe(server.url, num_streams=1, steady_s=5.0)
        with pytest.raises(RequestError, match="a stream ended after 26 tokens"):
            asyncio.run(probe.run())
