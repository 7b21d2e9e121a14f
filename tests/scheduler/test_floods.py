"""Floods by one tenant: how long other tenants wait, and whether admitted requests advance.

Each case runs the engine's loop and scheduler against a simulated machine of a stated shape.
"""

from functools import cache
from typing import Any

import msgspec
import pytest
from benchmarks.arena.adversaries import adversaries
from benchmarks.arena.case import Case, Pause, Shape, Source
from benchmarks.arena.issue_cases import issue_cases
from benchmarks.arena.outcome import Outcome
from benchmarks.arena.shapes import alone_s
from benchmarks.arena.simulation import run

from legato.core.slo import BATCH
from legato.scheduler.step_costs import StepCosts

SECONDS = 25.0
MOST_S = 10.0
"""After this wait a request goes before all others, or moves at the cost of promises."""
SLACK_S = 1.0
"""A step and the request's own prompt."""


@cache
def flood(name: str, seconds: float = SECONDS) -> Outcome:
    """Run the flood SHAPE/FLOOD/TENANTS/PROMISE."""
    outcome = run(next(case for case in adversaries(seconds) if case.name == name))
    assert not outcome.error
    return outcome


def issue_case(name: str, **changes: Any) -> Outcome:
    case = next(case for case in issue_cases() if case.name == name)
    outcome = run(msgspec.structs.replace(case, **changes))
    assert not outcome.error
    return outcome


FLOODED = [
    "135m/streams/2/none",
    "135m/streams/2/below",
    "135m/prompts/20/above",
    "135m/mixture/2/ttft",
    "135m/batch/2/ttft",
    "7b/streams/2/above",
    "7b/streams/2/below",
    "7b/deep/2/ttft",
    "7b/prompts/2/above",
    "7b/batch/2/above",
    "7b/batch/20/below",
    "7b/mixture/20/shed",
    "70b/streams/20/ttft",
    "70b/deep/2/above",
    "70b/batch/20/ttft",
    "hybrid/streams/2/below",
    "hybrid/batch/2/shed",
]


TWICE = {
    "135m/batch/2/ttft",
    "7b/batch/20/below",
    "7b/mixture/20/ttft",
    "70b/streams/20/ttft",
    "135m/streams/2/below",
}
"""Floods in which several have waited so long, or promised streams take the place of a best-effort
one, and the next one waits as long again."""


def most_s(name: str) -> float:
    return SLACK_S + MOST_S * (2 if name in TWICE else 1)


@pytest.mark.parametrize("name", FLOODED)
def test_an_admitted_request_advances_in_a_bounded_time(name: str) -> None:
    still = {source: one.still_s for source, one in flood(name).by_source.items()}
    assert max(still.values()) <= most_s(name), still


STANDING = [
    "135m/deep/20/above",
    "7b/mixture/20/ttft",
    "7b/batch/2/above",
    "hybrid/deep/20/ttft",
]


@pytest.mark.parametrize("name", STANDING)
def test_an_admitted_request_advances_in_a_long_flood(name: str) -> None:
    """Chunks of deep prompts find no room beside the streams."""
    still = {source: one.still_s for source, one in flood(name, 40.0).by_source.items()}
    assert max(still.values()) <= most_s(name), still


@pytest.mark.parametrize("name", FLOODED)
def test_a_light_tenant_has_first_tokens_in_a_bounded_time(name: str) -> None:
    sources = flood(name).by_source
    waits = {source: one.longest_s for source, one in sources.items() if source.startswith("z")}
    assert max(waits.values()) <= most_s(name), waits


@pytest.mark.parametrize("name", [name for name in FLOODED if not name.endswith("/shed")])
def test_a_tenant_that_waits_is_served_in_a_bounded_time(name: str) -> None:
    outcome = flood(name)
    assert outcome.denied_s <= most_s(name), outcome.denied_who


REFUSING = [
    "135m/streams/2/shed",
    "7b/streams/2/shed",
    "hybrid/streams/2/shed",
]


@pytest.mark.parametrize("name", REFUSING)
def test_a_refusal_tells_the_time_to_within_three_times(name: str) -> None:
    retries = flood(name).retries
    assert retries.num > 20
    assert retries.within >= 0.9, retries


@pytest.mark.parametrize("name", ["a9 shed 60", "a9 shed", "a9 queue 60", "a9 queue"])
def test_a_refusal_does_not_take_streams_to_last_to_the_end_of_the_context(name: str) -> None:
    outcome = issue_case(name)
    assert outcome.retries.within >= 0.9, outcome.retries


def test_clients_without_max_tokens_are_refused_as_often_as_others() -> None:
    told, untold = issue_case("a9 shed 60"), issue_case("a9 shed")
    assert untold.refused <= 1.5 * told.refused


COSTS = StepCosts(step_s=0.01, row_s=(0.0002,) * 5)
SMALL = Shape(name="small", costs=COSTS, max_model_len=32_000, kv_cache_tokens=32_000, noise=0.0)


@pytest.mark.parametrize("big_class", ["interactive", BATCH])
@pytest.mark.parametrize("streams_of", ["A", "B"])
@pytest.mark.parametrize("promise", [{}, {"itl_slo_s": 0.2}, {"ttft_slo_s": 5.0}])
def test_no_request_waits_for_another_tenants_while_blocks_are_free(
    promise: dict[str, float], streams_of: str, big_class: str
) -> None:
    """Streams hold some blocks, and a prompt of tenant A needs nearly all."""
    case = Case(
        name="blocks",
        shape=SMALL,
        settings={"max_num_seqs": 32, "max_num_batched_tokens": 2048, **promise},
        sources=[
            Source(
                name="streams",
                num_prompt_tokens=600,
                num_output_tokens=2500,
                tenant=streams_of,
                count=6,
            ),
            Source(
                name="big",
                num_prompt_tokens=29_000,
                num_output_tokens=3,
                tenant="A",
                slo_class=big_class,
                start_s=1.0,
            ),
            Source(
                name="short",
                num_prompt_tokens=50,
                num_output_tokens=3,
                tenant="C",
                every_s=0.5,
                count=16,
                start_s=1.2,
            ),
        ],
        until="short",
        seconds=60.0,
    )
    outcome = run(case)
    assert not outcome.error
    assert outcome.by_source["short"].longest_s <= SLACK_S


@pytest.mark.parametrize("pause", [Pause(at_s=2.0, seconds=s) for s in (0.03, 0.06, 0.09)])
def test_a_hiccup_between_steps_delays_first_tokens_by_little(pause: Pause) -> None:
    undisturbed = issue_case("a8 hiccup 0 ms").by_source["w"].longest_s
    delayed = issue_case("a8 hiccup 0 ms", pauses=[pause]).by_source["w"].longest_s
    assert delayed <= undisturbed + 0.5


@pytest.mark.parametrize("seconds", [0.5, 1.0, 5.0])
def test_a_pause_within_a_step_delays_first_tokens_by_little_more(seconds: float) -> None:
    undisturbed = issue_case("a8 pause 0 s").by_source["w"].longest_s
    delayed = issue_case("a8 pause 0 s", pauses=[Pause(at_s=2.0, seconds=seconds, in_step=True)])
    assert delayed.by_source["w"].longest_s <= undisturbed + seconds + 1.5


def test_a_token_due_at_once_does_not_end_the_engine() -> None:
    assert issue_case("a8 limit 0").by_source["w"].longest_s < 1.0


@pytest.mark.parametrize("name", ["a12", "a12 itl", "a12 ttft"])
def test_a_short_prompt_does_not_wait_for_a_long_one(name: str) -> None:
    case = next(case for case in issue_cases() if case.name == name)
    alone = {s.name: alone_s(case.shape.costs, s.num_prompt_tokens, 512, 0.0) for s in case.sources}
    sources = issue_case(name).by_source
    assert sources["short"].longest_s <= 5.0 * alone["short"] + 0.5
    assert sources["long"].longest_s <= 1.25 * alone["long"]
