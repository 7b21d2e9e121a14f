"""`python -m benchmarks routing`: its traffic, its ways to serve it, and what it counts."""

import itertools
from collections import defaultdict

import pytest
from benchmarks.routing.fleets import Fleet, on_a_virtual_clock
from benchmarks.routing.kill import LOST, REFUSED, TOLD_AFTER, TOLD_BEFORE, WHOLE, outcome
from benchmarks.routing.report import figures
from benchmarks.routing.traffic import MAX_MODEL_LEN, TRAFFIC, conversations

from legato_lab.simulation.record import RequestRecord, Status
from legato_lab.simulation.workload import Workload, WorkloadRequest

_DIED = '503: {"error": {"code": "engine_dead"}}'

FLEET = Fleet(
    profile="codellama-34b-a100-tp2",
    num_replicas=3,
    itl_slo_s=0.1,
    ttft_slo_s=3.0,
    is_shedding=False,
)


@pytest.mark.parametrize("name", TRAFFIC)
def test_traffic_comes_in_order_at_its_rate_and_fits(name: str) -> None:
    workload = TRAFFIC[name](400.0, 5.0, 1)
    arrivals_s = [request.arrival_s for request in workload]
    assert arrivals_s == sorted(arrivals_s)
    assert len(workload) == pytest.approx(2000, rel=0.25)
    for request in workload:
        assert request.num_prompt_tokens + request.num_output_tokens <= MAX_MODEL_LEN
    assert workload == TRAFFIC[name](400.0, 5.0, 1)
    assert workload != TRAFFIC[name](400.0, 5.0, 2)


def test_a_turn_begins_with_all_that_was_said_before() -> None:
    of_conversation = defaultdict[int, Workload](list)
    for request in conversations(200.0, 5.0, 0):
        of_conversation[request.hash_ids[-1] // 1024].append(request)
    assert len(of_conversation) > 100
    for turns in of_conversation.values():
        for earlier, later in itertools.pairwise(turns):
            assert later.hash_ids[: len(earlier.hash_ids)] == earlier.hash_ids
            assert later.num_prompt_tokens > earlier.num_prompt_tokens + earlier.num_output_tokens
            assert later.arrival_s > earlier.arrival_s


def test_where_the_prefix_is_cached_more_is_found_and_first_tokens_are_earlier() -> None:
    workload = conversations(40.0, 4.0, 0)
    found = {
        routing: figures([on_a_virtual_clock(FLEET, routing, workload, 0)], FLEET.slos)
        for routing in ("round-robin", "kept-promise")
    }
    blind, kept = found.values()
    assert blind.num_requests == kept.num_requests == len(workload)
    assert kept.hit_rate > 1.1 * blind.hit_rate
    assert kept.ttft_p50_s < blind.ttft_p50_s


def _record(status: Status, num_tokens: int, error: str | None = None) -> RequestRecord:
    return RequestRecord(
        request=WorkloadRequest(0.0, 10, 5),
        sent_s=0.0,
        status=status,
        token_times_s=[1.0 + token for token in range(num_tokens)],
        num_tokens=num_tokens,
        error=error,
    )


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (_record("ok", 5), WHOLE),
        (_record("ok", 4), LOST),
        (_record("refused", 0, "429: full"), REFUSED),
        (_record("error", 0, _DIED), TOLD_BEFORE),
        (_record("error", 3, _DIED), TOLD_AFTER),
        (_record("error", 3, "the stream broke off"), LOST),
        (_record("cancelled", 0), LOST),
    ],
)
def test_each_request_is_counted_as_what_became_of_it(record: RequestRecord, expected: str) -> None:
    assert outcome(record) == expected
