"""Simulated fleets: one engine is the simulator's own, and many lose nothing."""

from collections import Counter
from typing import Any

import msgspec
import pytest

from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.slo import INTERACTIVE
from legato_fleet.routing.router import ROUTING_POLICIES
from legato_lab.simulation.fleet import Hang, SimulatedFleet, Split
from legato_lab.simulation.fleet_run import FleetRun, simulate_fleet
from legato_lab.simulation.link import LinkTraffic, SimulatedLink
from legato_lab.simulation.profiled_server import SimulatedServer
from legato_lab.simulation.scaler import Scaler
from legato_lab.simulation.simulated_run import simulate
from legato_lab.simulation.summary import Slos, summarize
from legato_lab.simulation.tally import Tally
from legato_lab.simulation.workload import Workload, WorkloadRequest, with_poisson_arrivals
from legato_lab.workload.mixes import draw_mix
from tests.lab.simulated import CPU

PROMISED = SchedulerConfig(itl_slo_s=0.1, ttft_slo_s=3.0)
SERVER = SimulatedServer(profile=CPU, scheduler=PROMISED)
CHAT = with_poisson_arrivals(draw_mix("chat", 16, seed=0), 2.0, seed=0)


def sessions(num_sessions: int, num_turns: int, every_s: float) -> Workload:
    """Conversations in turn, each of whose prompts begins with the one before."""
    return [
        WorkloadRequest(
            every_s * (turn * num_sessions + session),
            512 * (turn + 1) + 20,
            8,
            hash_ids=tuple(1000 * session + block for block in range(turn + 1)),
        )
        for turn in range(num_turns)
        for session in range(num_sessions)
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_fleet_of_one_is_the_server_itself(depth: int) -> None:
    scheduler = msgspec.structs.replace(PROMISED, num_steps_in_flight=depth, shed_load=True)
    server = SimulatedServer(profile=CPU, scheduler=scheduler)
    one = simulate_fleet(SimulatedFleet(server=server, split=Split(both=1)), CHAT)
    alone = simulate(server, CHAT)
    assert one.records == alone.records
    assert one.duration_s == alone.duration_s
    assert one.num_steps == alone.num_steps


@pytest.mark.parametrize("routing", ROUTING_POLICIES)
def test_every_request_ends_once_somewhere(routing: str) -> None:
    fleet = SimulatedFleet(server=SERVER, split=Split(both=3), routing=routing)
    run = simulate_fleet(fleet, CHAT)
    assert [record.request for record in run.records] == CHAT
    assert all(
        r.status == "ok" and r.num_tokens == r.request.num_output_tokens for r in run.records
    )
    assert run == simulate_fleet(fleet, CHAT)
    assert all(replica.num_steps for replica in run.replicas)


def test_sessions_stay_where_their_prefix_is() -> None:
    """Four sessions in turn, three replicas: by turns alone, each would move at every turn."""
    workload = sessions(num_sessions=4, num_turns=4, every_s=2.0)
    cached = {
        routing: summarize(
            simulate_fleet(
                SimulatedFleet(server=SERVER, split=Split(both=3), routing=routing), workload
            ).records,
            Slos(default=PROMISED.classes[INTERACTIVE]),
        ).cached_share
        or 0.0
        for routing in ("round-robin", "prefix-affinity", "kept-promise")
    }
    assert cached["round-robin"] < 0.1
    assert cached["prefix-affinity"] > 0.55
    assert cached["kept-promise"] > 0.45


APART = SimulatedFleet(
    server=SERVER, split=Split(prefill=2, decode=1), kv_token_bytes=CPU.kv_token_bytes
)


def test_a_prompt_computed_elsewhere_is_continued_with_nothing_left_behind() -> None:
    run = simulate_fleet(APART, CHAT)
    assert [record.num_tokens for record in run.records] == [r.num_output_tokens for r in CHAT]
    assert all(record.status == "ok" for record in run.records)
    assert all(replica.stats.kv_usage == 0.0 for replica in run.replicas)
    assert all(replica.num_steps for replica in run.replicas)
    # What generates has at most a block of each prompt to compute.
    num_prompt = sum(request.num_prompt_tokens for request in CHAT)
    num_cached = sum(record.num_cached_tokens or 0 for record in run.records)
    assert num_cached >= num_prompt - 17 * len(CHAT)


def test_a_prompt_takes_what_its_blocks_take_to_come() -> None:
    """A chunk is sent while the next is computed, so that only the last one is waited for."""
    prompt = [WorkloadRequest(0.0, 4096 + 1, 2)]
    token_bytes = CPU.kv_token_bytes
    assert token_bytes is not None
    ttfts_s = []
    for tokens_per_s in (1e9, 2048.0):
        link = SimulatedLink(bytes_per_s=tokens_per_s * token_bytes, latency_s=0.0)
        run = simulate_fleet(msgspec.structs.replace(APART, link=link), prompt)
        ttfts_s.append(run.records[0].ttft_s or 0.0)
    assert 0.02 < ttfts_s[1] - ttfts_s[0] < 1.0  # all of it would take 2 s
    (alone,) = simulate(SERVER, prompt).records
    assert alone.ttft_s == pytest.approx(ttfts_s[0], rel=0.2)


@pytest.mark.parametrize("split", [Split(prefill=1, decode=1), Split(prefill=1, decode=2)])
def test_refusals_at_either_end_leave_nothing_behind(split: Split) -> None:
    scheduler = msgspec.structs.replace(
        PROMISED, shed_load=True, ttft_slo_s=1.0, max_num_seqs=2, max_waiting=2
    )
    server = SimulatedServer(profile=CPU, scheduler=scheduler)
    crowd = with_poisson_arrivals(draw_mix("chat", 20, seed=1), 20.0, seed=1)
    fleet = msgspec.structs.replace(APART, server=server, split=split)
    run = simulate_fleet(fleet, crowd)
    statuses = {record.status for record in run.records}
    assert statuses == {"ok", "refused"}
    assert all(replica.stats.kv_usage == 0.0 for replica in run.replicas)
    assert all(replica.stats.num_running == 0 for replica in run.replicas)


def test_who_sends_blocks_must_know_their_size() -> None:
    with pytest.raises(ConfigError, match="kv_token_bytes"):
        SimulatedFleet(server=SERVER, split=Split(prefill=1, decode=1))


@pytest.mark.parametrize(
    ("text", "split"),
    [("4 both", Split(both=4)), ("2 prefill+1 decode", Split(prefill=2, decode=1))],
)
def test_splits(text: str, split: Split) -> None:
    assert Split.parse(text) == split
    assert Split.parse(str(split)) == split
    assert len(split.roles) == len(split)


@pytest.mark.parametrize(
    "text", ["", "4", "both", "0 both", "2 prefill", "1 both + 1 prefill + 1 decode", "9999 both"]
)
def test_no_splits(text: str) -> None:
    with pytest.raises(ConfigError):
        Split.parse(text)


def test_a_link_is_shared_at_its_ends() -> None:
    traffic = LinkTraffic(SimulatedLink(bytes_per_s=100.0, latency_s=0.5))
    assert traffic.send("a", "b", 100.0, 0.0) == 1.5
    assert traffic.send("c", "d", 100.0, 0.0) == 1.5
    assert traffic.send("a", "d", 100.0, 0.0) == 2.5
    assert traffic.send("c", "b", 100.0, 5.0) == 6.5


def counted(run: FleetRun) -> Counter[str]:
    """Requests by what became of them; every one has an end."""
    statuses = Counter(record.status for record in run.records)
    assert statuses.total() == len(run.records)
    return statuses


def test_a_tally_says_what_the_records_say() -> None:
    fleet = SimulatedFleet(server=SERVER, split=Split(both=2))
    slos = Slos(default=PROMISED.classes[INTERACTIVE])
    exact, tally = simulate_fleet(fleet, CHAT), Tally(slos)
    run = simulate_fleet(fleet, CHAT, tally=tally)
    assert run == msgspec.structs.replace(exact, records=[])
    found, expected = tally.summary(), summarize(exact.records, slos)
    assert (found.num_requests, found.attainment) == (expected.num_requests, expected.attainment)


@pytest.mark.parametrize("split", [Split(both=3), Split(prefill=2, decode=2)])
def test_of_replicas_that_die_nothing_is_lost_silently(split: Split) -> None:
    crowd = with_poisson_arrivals(draw_mix("chat", 40, seed=3), 4.0, seed=3)
    fleet = msgspec.structs.replace(
        APART, split=split, mtbf_s=8.0, start_s=2.0, seed=1, routing="power-of-two"
    )
    run = simulate_fleet(fleet, crowd)
    statuses = counted(run)
    assert [record.request for record in run.records] == crowd
    assert statuses.keys() <= {"ok", "error"}
    dead = [replica for replica in run.replicas if replica.is_lost]
    assert dead
    assert statuses["error"] == run.num_lost > 0
    assert run.num_reruns > 0
    assert all(r.num_tokens == r.request.num_output_tokens for r in run.records if r.status == "ok")
    # Requests that a dead replica had begun are reported, and others' blocks are free again.
    assert all(replica.stats.kv_usage == 0.0 for replica in run.replicas if not replica.is_lost)
    assert sum(replica.num_requests for replica in run.replicas) >= len(crowd) + run.num_reruns


@pytest.mark.parametrize("routing", ROUTING_POLICIES)
def test_a_replica_that_hangs_gets_few_requests(routing: str) -> None:
    """The replica takes requests for a minute, eight a second, and does nothing."""
    short = [
        msgspec.structs.replace(one, num_output_tokens=min(one.num_output_tokens, 48))
        for one in draw_mix("chat", 300, seed=5)
    ]
    crowd = with_poisson_arrivals(short, 8.0, seed=5)
    hang = Hang(place=1, from_s=5.0, until_s=65.0)
    server = SimulatedServer(
        profile=CPU, scheduler=msgspec.structs.replace(PROMISED, max_num_seqs=64)
    )
    fleet = SimulatedFleet(server=server, split=Split(both=4), routing=routing, hang=hang)
    run = simulate_fleet(fleet, crowd)
    assert counted(run) == {"ok": 300}
    others = [replica.num_requests for replica in run.replicas if replica.replica_id != "both-1"]
    [hung] = [replica for replica in run.replicas if replica.replica_id == "both-1"]
    # Two seconds' worth before it hung and again when it was doubtful, of forty.
    assert hung.num_requests < 0.6 * min(others)
    assert run.num_reruns > 0
    assert run == simulate_fleet(fleet, crowd)


def test_a_fleet_of_one_that_hangs_goes_on_after() -> None:
    hang = Hang(from_s=3.0, until_s=40.0)
    fleet = SimulatedFleet(server=SERVER, split=Split(both=1), hang=hang)
    run = simulate_fleet(fleet, CHAT)
    assert counted(run) == {"ok": len(CHAT)}
    assert run.num_reruns == 0


def test_while_no_replica_is_there_requests_wait() -> None:
    requests = [WorkloadRequest(float(second), 64, 2) for second in range(20)]
    fleet = SimulatedFleet(server=SERVER, split=Split(both=1), mtbf_s=4.0, start_s=3.0)
    run = simulate_fleet(fleet, requests)
    assert len(run.replicas) > 1
    assert counted(run)["ok"] + run.num_lost == 20
    assert max(record.ttft_s or 0.0 for record in run.records) > 1.0


def test_who_is_refused_comes_again_when_told_to() -> None:
    scheduler = msgspec.structs.replace(PROMISED, shed_load=True, ttft_slo_s=1.0, max_num_seqs=4)
    server = SimulatedServer(profile=CPU, scheduler=scheduler)
    crowd = with_poisson_arrivals(draw_mix("chat", 24, seed=1), 12.0, seed=1)
    once = SimulatedFleet(server=server, split=Split(both=2))
    first = simulate_fleet(once, crowd)
    refused = counted(first)["refused"]
    assert first.num_tried_again >= refused > 0  # each of them by both
    again = simulate_fleet(msgspec.structs.replace(once, max_retries=50), crowd)
    assert counted(again)["refused"] < refused
    assert again.num_retries >= refused
    late = [r for r in again.records if (r.ttft_s or 0.0) > 1.0]
    assert late  # a retry is no new promise


def test_replicas_are_started_under_strain_and_ended_after() -> None:
    rush = with_poisson_arrivals(draw_mix("chat", 150, seed=1), 8.0, seed=1)
    calm = [WorkloadRequest(20.0 + 5.0 * number, 64, 2) for number in range(80)]
    scheduler = SchedulerConfig(ttft_slo_s=2.0)
    server = SimulatedServer(profile=CPU, scheduler=scheduler)
    fleet = SimulatedFleet(server=server, split=Split(both=1), max_replicas=3, start_s=5.0)
    workload = sorted([*rush, *calm], key=lambda request: request.arrival_s)
    run = simulate_fleet(fleet, workload)
    assert counted(run) == {"ok": len(workload)}
    assert len(run.replicas) == 3
    assert all(10.0 < replica.started_s < 40.0 for replica in run.replicas[1:])
    (ended,) = [replica for replica in run.replicas if replica.ended_s < run.duration_s]
    assert ended.ended_s > 320.0
    assert not ended.is_lost


def test_more_replicas_are_wanted_once_that_was_so_for_a_while() -> None:
    scaler = Scaler(1, 3)
    assert [scaler.wanted([2.0], now_s) for now_s in (0.0, 9.0, 10.0)] == [1, 1, 3]
    assert [scaler.wanted([0.1, 0.1], now_s) for now_s in (20.0, 319.0, 320.0)] == [2, 2, 1]
    assert scaler.wanted([0.1, 0.1], 321.0) == 2  # that was one; the next takes as long
    assert scaler.wanted([0.0], 1000.0) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"max_replicas": 1, "split": Split(both=2)},
        {"max_replicas": 4},
        {"mtbf_s": 0.0},
        {"start_s": -1.0},
    ],
)
def test_no_fleets(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        msgspec.structs.replace(APART, **settings)
