"""The search finds what trying everything finds, with a part of the work."""

import itertools

import msgspec
import pytest

from legato.core.config import SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.slo import SloClass
from legato_lab.simulation.drafts import Acceptance
from legato_lab.simulation.summary import Slos
from legato_lab.simulation.workload import WorkloadRequest, with_poisson_arrivals
from legato_lab.tune.candidate import Candidate, Space, check_goal
from legato_lab.tune.search import search
from legato_lab.tune.tables import describe
from legato_lab.tune.trial import Problem, evaluate
from legato_lab.workload.mixes import draw_mix
from tests.lab.tune.machines import CPU

SLO = SloClass(itl_s=0.15, ttft_s=3.0)
PROBLEM = Problem(
    machine=CPU,
    workload=with_poisson_arrivals(draw_mix("code", 10, seed=0), 0.8, seed=0),
    goal=SchedulerConfig(itl_slo_s=SLO.itl_s, ttft_slo_s=SLO.ttft_s),
    slos=Slos(default=SLO),
)
SPACE = Space(
    steps=("slo", "fixed"),
    max_num_batched_tokens=(64, 256, 2048),
    max_num_seqs=(4, 64),
    prefill_order=("fcfs", "edf"),
    shed_load=(False,),
    pace=(0.7, 1.0),
)


def everything() -> list[Candidate]:
    return [
        Candidate(
            steps=steps,
            max_num_batched_tokens=budget,
            max_num_seqs=num_seqs,
            prefill_order=order,
            pace=pace,
        )
        for steps, pace in (("slo", 0.7), ("slo", 1.0), ("fixed", 1.0))
        for budget, num_seqs, order in itertools.product(
            SPACE.max_num_batched_tokens, SPACE.max_num_seqs, SPACE.prefill_order
        )
    ]


def test_the_best_is_found() -> None:
    assert len(everything()) == SPACE.size == 36
    scores = {candidate: evaluate(PROBLEM, candidate, 1.0, 1).score for candidate in everything()}
    told: list[int] = []
    found = search(PROBLEM, SPACE, num_trials=24, seed=0, num_processes=1, on_trial=told.append)
    assert told[-1] == 24
    assert len(found.tried) < 24
    assert scores[found.tried[0].candidate] >= 0.75 * max(scores.values())


def test_one_seed_always_gives_the_same() -> None:
    """However many processes there are."""
    few = msgspec.structs.replace(PROBLEM, workload=PROBLEM.workload[:6])
    one, two = (
        search(few, SPACE, num_trials=12, seed=3, num_processes=n, on_trial=lambda _: None)
        for n in (1, 2)
    )
    assert one == two


def test_what_is_given_is_not_searched() -> None:
    space = Space.around(PROBLEM.goal, {"max_num_seqs": 48, "prefill_order": "lpm"}, 8192)
    assert (space.max_num_seqs, space.prefill_order) == ((48,), ("lpm",))
    assert space.steps == ("slo", "fixed", "prefill-first")
    assert Space.around(PROBLEM.goal, {"policy": "stall-free"}, 8192).steps == ("slo", "fixed")
    assert max(Space.around(PROBLEM.goal, {}, 300).max_num_batched_tokens) == 256


def test_only_the_pace_of_time_budgets_is_scaled() -> None:
    goal = SchedulerConfig(itl_slo_s=0.2, ttft_slo_s=2.0, slo_classes={"slow": SloClass(itl_s=1.0)})
    shared = {"max_num_batched_tokens": 512, "max_num_seqs": 8, "prefill_order": "edf"}
    paced = Candidate(steps="slo", pace=0.8, **shared).configure(goal)  # type: ignore[arg-type]
    assert (paced.itl_slo_s, paced.ttft_slo_s) == (0.16, 2.0)
    assert paced.slo_classes["slow"].itl_s == 0.8
    fixed = Candidate(steps="fixed", **shared).configure(goal)  # type: ignore[arg-type]
    assert (fixed.itl_slo_s, fixed.ttft_slo_s) == (None, 2.0)
    assert not fixed.promises_pace


def test_whole_prompts_cannot_be_tuned() -> None:
    goal = SchedulerConfig(ttft_slo_s=1.0, enable_chunked_prefill=False)
    with pytest.raises(ConfigError, match="chunked prefill is off"):
        check_goal(goal)


def test_drafts_are_searched_where_it_is_known_how_often_they_are_right() -> None:
    goal = PROBLEM.goal
    without, drafting = Space.around(goal, {}, 8192), Space.around(goal, {}, 8192, drafts=True)
    assert drafting.size == 2 * without.size
    given = Space.around(goal, {"speculative": 4}, 8192, drafts=True)
    assert (given.speculative, given.size) == ((4,), without.size)
    space = msgspec.structs.replace(SPACE, speculative=("off", "auto"))
    answering = [WorkloadRequest(1.0 * i, 40, 60) for i in range(8)]  # hardly any prefill
    acceptance = Acceptance.even(0.9)
    problem = msgspec.structs.replace(PROBLEM, workload=answering, acceptance=acceptance)
    found = search(problem, space, num_trials=24, seed=0, num_processes=1, on_trial=lambda _: None)
    best = found.tried[0].candidate
    assert best.speculative == "auto"
    assert best.configure(goal).speculative == "auto"
    assert describe(best).endswith("speculative auto")
    plain = msgspec.structs.replace(best, speculative=None)
    assert plain.configure(msgspec.structs.replace(goal, speculative=7)).speculative == 7
