"""The arena measures what clients and tenants get."""

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from benchmarks.arena.adversaries import FLOODS, PROMISES, adversaries
from benchmarks.arena.case import Case, Pause, Shape, Source
from benchmarks.arena.issue_cases import issue_cases
from benchmarks.arena.outcome import Outcome, Retries
from benchmarks.arena.shapes import alone_s, prompt_of, shapes, stream_s
from benchmarks.arena.simulation import run
from benchmarks.arena.slowdown import SlowdownRun, measure
from benchmarks.arena.tables import case_table, flood_table, slowdown_tables, summary_table

from legato.scheduler.order import ORDERS
from legato.scheduler.step_costs import StepCosts

STEP_S = 0.01
COSTS = StepCosts(step_s=STEP_S, row_s=(0.0002,) * 5)
EXACT = Shape(
    name="exact",
    costs=COSTS,
    max_model_len=4096,
    kv_cache_tokens=32_000,
    truth_error=0.0,
    noise=0.0,
    turnaround_s=0.0,
)


def ran(*sources: Source, **fields: Any) -> Outcome:
    outcome = run(Case(name="case", shape=EXACT, sources=[*sources], **fields))
    assert not outcome.error
    return outcome


def source(name: str, prompt: int, output: int, **fields: Any) -> Source:
    return Source(name=name, num_prompt_tokens=prompt, num_output_tokens=output, **fields)


def test_a_prompt_alone_waits_as_long_as_the_costs_say() -> None:
    outcome = ran(source("a", 1000, 5), until="a")
    assert outcome.by_source["a"].longest_s == pytest.approx(alone_s(COSTS, 1000, 512, 0.0))
    assert (outcome.first_who, outcome.is_open) == ("a", False)
    assert outcome.by_source["a"].gaps == 4
    assert outcome.still_s == pytest.approx(STEP_S + 512 * 0.0002)
    assert outcome.shares == {"default": pytest.approx(1.0)}


def test_a_request_without_a_first_token_waits_until_the_end() -> None:
    settings = {"max_num_seqs": 1}
    outcome = ran(source("a", 10, 4000), source("b", 10, 1), settings=settings, seconds=5.0)
    assert (outcome.first_who, outcome.is_open) == ("b", True)
    assert outcome.first_s == pytest.approx(5.0, abs=0.1)


def test_tenants_that_ask_for_as_much_have_their_shares() -> None:
    floods = [source(name, 50, 20, tenant=name, num_clients=20, spread=0.2) for name in ("a", "b")]
    outcome = ran(*floods, settings={"max_num_seqs": 8}, seconds=20.0)
    assert outcome.shares == {name: pytest.approx(1.0, abs=0.1) for name in ("a", "b")}
    weights = {"max_num_seqs": 8, "tenant_weights": {"a": 3.0}}
    outcome = ran(*floods, settings=weights, seconds=20.0)
    assert outcome.shares == {name: pytest.approx(1.0, abs=0.15) for name in ("a", "b")}


def test_promises_are_judged_as_clients_do() -> None:
    settings = {"itl_slo_s": 0.011, "max_num_seqs": 4}
    alone = ran(source("a", 10, 50), settings=settings, until="a")
    assert (alone.late, alone.kept, alone.promised) == (0, 1, 1)
    paused = ran(
        source("a", 10, 50),
        settings=settings,
        until="a",
        pauses=[Pause(at_s=0.1, seconds=1.0), Pause(at_s=1.2, seconds=0.5, in_step=True)],
    )
    assert (paused.late, paused.kept, paused.promised) == (2, 0, 1)
    assert paused.by_source["a"].still_s == pytest.approx(1.0 + STEP_S, abs=0.001)
    assert paused.seconds == pytest.approx(alone.seconds + 1.5)


def test_the_truth_of_a_refusal_is_when_the_next_one_gets_in() -> None:
    settings = {"max_num_seqs": 1, "max_waiting": 1}
    outcome = ran(source("a", 10, 300, every_s=0.5, count=20), settings=settings, seconds=9.0)
    assert outcome.refused > 10
    assert outcome.by_source["a"].num_refused == outcome.refused == outcome.retries.num
    assert 1.0 <= outcome.retries.true_s <= 3.5


def test_times_in_refusals_may_be_wrong_by_three() -> None:
    told = Retries.of([(1.0, 2.9, False), (30.0, 2.0, False), (2.0, 30.0, False)])
    assert told.within == pytest.approx(1 / 3)
    open_ = Retries.of([(900.0, 20.0, True), (2.0, 20.0, True)])
    assert open_.within == 0.5


def test_clients_come_back_after_refusals() -> None:
    settings = {"max_num_seqs": 1, "max_waiting": 1}
    outcome = ran(source("a", 10, 100, num_clients=3), settings=settings, seconds=20.0)
    assert outcome.refused > 5
    assert outcome.by_source["a"].ended > 10


def test_clients_leave_after_their_output() -> None:
    outcome = ran(source("a", 10, 5, max_tokens=4000), until="a")
    assert outcome.by_source["a"].tokens == 5


def test_the_four_shapes_are_as_described() -> None:
    known = shapes()
    assert {*known} == {"135m", "7b", "70b", "hybrid"}
    assert all(shape.max_model_len == 131_072 for shape in known.values())
    assert 0.012 < stream_s(known["7b"].costs) < 0.03
    assert known["7b"].costs.decode_context_s == pytest.approx(1.1e-6)
    context_s = stream_s(known["hybrid"].costs, 128_000) - stream_s(known["hybrid"].costs, 1)
    assert context_s < 0.2 * stream_s(known["hybrid"].costs, 1)
    for shape in known.values():
        length = prompt_of(shape, 8.0)
        assert alone_s(shape.costs, length, 512, shape.turnaround_s) == pytest.approx(8.0, rel=0.1)


def test_cases_travel_as_json() -> None:
    cases = [*issue_cases(), *adversaries(60.0)]
    assert len({case.name for case in cases}) == len(cases)
    assert {case.name.split()[0] for case in issue_cases()} == {f"a{i}" for i in range(1, 13)}
    assert msgspec.json.decode(msgspec.json.encode(cases), type=list[Case]) == cases


@pytest.mark.parametrize(("flood", "promise"), [*itertools.product(FLOODS, ("none", "shed"))])
def test_every_flood_runs(flood: str, promise: str) -> None:
    assert promise in PROMISES
    case = next(c for c in adversaries(4.0) if c.name == f"135m/{flood}/20/{promise}")
    outcome = run(case)
    assert not outcome.error
    assert outcome.num_steps > 3
    for table in (flood_table, summary_table):
        assert table([(case, outcome, outcome)]).rows


def test_a_case_is_told_in_the_issues_words() -> None:
    case = next(case for case in issue_cases() if case.name == "a12")
    table = case_table([(case, None, run(case))])
    assert table.rows[0][:2] == ["a12", case.issue]
    assert table.rows[0][2].startswith("short ")


def test_slowdown_is_of_each_order(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        f'{{"timestamp": {100 * i}, "input_length": {50 + 700 * (i % 3)}, "output_length": 5}}'
        for i in range(40)
    ]
    trace.write_text("\n".join(rows))
    ask = SlowdownRun(
        trace=str(trace), num_requests=40, shape=EXACT, load=0.05, order="fcfs", settings={}
    )
    alone = measure(ask)
    assert alone is not None
    assert alone.all.p50 == pytest.approx(1.0, abs=0.1)
    assert sum(part.num for part in alone.by_length.values()) == alone.all.num == 40
    busy = [
        measure(msgspec.structs.replace(ask, load=0.9, order=order, is_poisson=True))
        for order in ORDERS
    ]
    assert all(one is not None and one.all.mean > 1.2 for one in busy)
    assert measure(msgspec.structs.replace(ask, order="dice")) is None
    (table,) = slowdown_tables(busy, None)
    assert [row[0] for row in table.rows] == [*ORDERS]
