"""Prompts that share what their hash ids say, simulated and sent."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.cache_config import BLOCK_SIZES
from legato.core.config import SchedulerConfig
from legato_lab.simulation.profiled_server import SimulatedServer
from legato_lab.simulation.prompts import SimulatedPrompts
from legato_lab.simulation.simulated_run import simulate
from legato_lab.simulation.summary import Slos, summarize
from legato_lab.simulation.workload import (
    HASH_BLOCK,
    RandomPrompts,
    Workload,
    WorkloadRequest,
    num_hash_blocks,
)
from tests.lab.simulated import CPU
from tests.lab.test_workload import workloads

_BLOCK = BLOCK_SIZES["cpu"]
_ENDLESS = msgspec.structs.replace(CPU, max_model_len=32_768, kv_cache_tokens=10_000_000)


def num_cached(workload: Workload, **settings: object) -> list[int | None]:
    server = SimulatedServer(profile=_ENDLESS, scheduler=SchedulerConfig(), **settings)  # type: ignore[arg-type]
    return [record.num_cached_tokens for record in simulate(server, workload).records]


def request(place: int, num_tokens: int, *hash_ids: int) -> WorkloadRequest:
    """Long after the one before it."""
    return WorkloadRequest(1000.0 * place, num_tokens, 3, hash_ids=hash_ids)


REPEATING = [
    request(0, 1200, 0, 1, 2),
    request(1, 2000, 0, 1, 3, 4),  # two blocks are known
    request(2, 1200, 0, 1, 2),  # all is known, but the last token is computed
    request(3, 1536, 5, 1, 2),  # a block counts only behind the same ones
    request(4, 1300, 0, 1, 2),  # the third has become longer
    request(5, 700, 0),  # the rest is its own
    request(6, 700, 0),
    request(7, 40),
    request(8, 40),
]
CACHED = [0, 1024, 1184, 0, 1184, 512, 512, 0, 0]


def test_hits_are_those_that_a_hand_counts() -> None:
    assert num_cached(REPEATING) == CACHED
    assert num_cached(REPEATING, enable_prefix_caching=False) == [0] * len(REPEATING)


def test_a_report_says_what_share_came_from_the_cache() -> None:
    server = SimulatedServer(profile=_ENDLESS, scheduler=SchedulerConfig())
    summary = summarize(simulate(server, REPEATING).records, Slos())
    num_prompt = sum(r.num_prompt_tokens for r in REPEATING)
    assert summary.cached_share == pytest.approx(sum(CACHED) / num_prompt)


_ids = st.lists(st.integers(0, 3), min_size=1, max_size=5)


@given(st.lists(st.tuples(_ids, st.integers(1, HASH_BLOCK)), min_size=1, max_size=8))
def test_an_endless_cache_hits_whatever_was_there(drawn: list[tuple[list[int], int]]) -> None:
    """Requests one after the other, the last block of each full to any part."""
    workload = [
        request(place, HASH_BLOCK * (len(ids) - 1) + last, *ids)
        for place, (ids, last) in enumerate(drawn)
    ]
    prompts = SimulatedPrompts()
    tokens = [prompts.draw(one).tolist() for one in workload]
    expected = []
    for place, own in enumerate(tokens):
        shared = max((_num_equal(own, other) for other in tokens[:place]), default=0)
        expected.append(min(shared, len(own) - 1) // _BLOCK * _BLOCK)
    assert num_cached(workload) == expected


def test_requests_at_once_compute_what_they_share_once() -> None:
    together = [
        WorkloadRequest(0.0, 5000, 2, hash_ids=tuple(range(num_hash_blocks(5000))))
        for _ in range(4)
    ]
    assert sorted(n or 0 for n in num_cached(together)) == [0, 4992, 4992, 4992]


@given(workloads)
def test_simulated_and_sent_prompts_share_the_same(workload: Workload) -> None:
    few = [msgspec.structs.replace(r, num_prompt_tokens=1 + r.num_prompt_tokens % 2000, hash_ids=())
           for r in workload[:4]]  # fmt: skip
    few = [
        msgspec.structs.replace(
            r, hash_ids=tuple(range(place % 2, num_hash_blocks(r.num_prompt_tokens)))
        )
        for place, r in enumerate(few)
    ]
    # Of so many tokens that two prompts which share nothing do not begin alike by chance.
    simulated, sent = SimulatedPrompts(), RandomPrompts(vocab_size=2**62, seed=0)
    virtual = [simulated.draw(one).tolist() for one in few]
    real = [sent.draw_for(one) for one in few]
    assert [len(ids) for ids in real] == [r.num_prompt_tokens for r in few]
    for one in range(len(few)):
        for other in range(one):
            assert _num_equal(virtual[one], virtual[other]) == _num_equal(real[one], real[other])


def test_another_run_shares_nothing_with_this_one() -> None:
    prompts = RandomPrompts(vocab_size=32_000, seed=0)
    one = request(0, 600, 1, 2)
    before = prompts.draw_for(one)
    assert prompts.draw_for(one) == before
    prompts.share_anew()
    assert prompts.draw_for(one)[0:8] != before[0:8]
    assert RandomPrompts(vocab_size=32_000, seed=0).draw_for(one)[0:8] != before[0:8]


def test_without_hash_ids_nothing_is_shared() -> None:
    prompts = SimulatedPrompts()
    drawn = [prompts.draw(request(0, 64)) for _ in range(3)]
    assert len({ids[0] for ids in drawn}) == 3


def _num_equal(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
