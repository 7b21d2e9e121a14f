"""What is said of splits, from what was simulated of them."""

import pytest

from legato.bench.simulation.fleet import Split
from legato.tune.score import Figures
from legato.tune.splits import LOADS, Fleet, SplitFigures, best_split, served_load, verdict


def figures(split: str, *attained: float) -> list[SplitFigures]:
    """Of a split that attained so much at each load."""
    return [
        SplitFigures(
            split=split,
            is_apart="prefill" in split,
            load=load,
            figures=Figures(
                goodput_per_s=load * attainment,
                attainment=attainment,
                itl_p99_s=0.1,
                ttft_p99_s=1.0,
                score=0.0,
            ),
        )
        for load, attainment in zip(LOADS, attained, strict=True)
    ]


TOGETHER = figures("3 both", 1.0, 1.0, 0.99, 0.9, 0.2)
APART = figures("2 prefill + 1 decode", 1.0, 0.98, 1.0, 0.95, 0.1)


def test_all_splits_of_as_many_machines() -> None:
    assert Fleet(num_replicas=3, kv_token_bytes=1.0).splits == [
        Split(both=3),
        Split(prefill=2, decode=1),
        Split(prefill=1, decode=2),
    ]
    assert Fleet(num_replicas=3).splits == [Split(both=3)]


def test_a_load_is_served_where_all_smaller_ones_are() -> None:
    both = TOGETHER + APART
    assert served_load(both, "3 both") == 1.0
    assert served_load(both, "2 prefill + 1 decode") == 0.5
    assert best_split(both) == "3 both"


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (TOGETHER, "not tried"),
        (TOGETHER + APART, "at 1x (2 prefill + 1 decode: 100.0% attained, 99.0% together), 1.4x"),
        (TOGETHER + figures("1 prefill + 2 decode", *[0.1] * 5), "at least as good"),
    ],
)
def test_the_verdict(found: list[SplitFigures], told: str) -> None:
    assert told in verdict(found)
