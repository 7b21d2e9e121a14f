"""What is said of splits, from what was simulated of them."""

import pytest

from legato.core.config import SchedulerConfig
from legato_lab.simulation.fleet import Split
from legato_lab.tune.candidate import Candidate, Space
from legato_lab.tune.score import Figures
from legato_lab.tune.splits import (
    LOADS,
    Fleet,
    SplitFigures,
    SplitSettings,
    best_split,
    decode_candidates,
    prefill_candidates,
    served_load,
    verdict,
)

CANDIDATE = Candidate(
    steps="slo", max_num_batched_tokens=512, max_num_seqs=16, prefill_order="edf", pace=0.8
)


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
            settings=SplitSettings(prefill=None, others=CANDIDATE),
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


def test_each_kind_of_machine_is_tried_with_what_matters_to_it() -> None:
    space = Space.around(SchedulerConfig(itl_slo_s=0.1, ttft_slo_s=1.0), {}, 8192)
    prefills, decodes = prefill_candidates(CANDIDATE, space), decode_candidates(CANDIDATE, space)
    assert {one.max_num_batched_tokens for one in prefills} == {512, 1024, 2048, 4096, 8192}
    assert {one.prefill_order for one in prefills} == {"slowdown", "fcfs", "edf"}
    assert {(one.steps, one.max_num_seqs) for one in prefills} == {("fixed", 16)}
    assert [one.max_num_seqs for one in decodes] == list(space.max_num_seqs)
    assert all(one.configure(SchedulerConfig(itl_slo_s=0.1)).itl_slo_s == 0.08 for one in decodes)


def test_what_was_given_is_not_searched() -> None:
    given = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "prefill_order": "fcfs"}
    space = Space.around(SchedulerConfig(itl_slo_s=0.1, ttft_slo_s=1.0), given, 8192)
    (prefill,) = prefill_candidates(CANDIDATE, space)
    (decode,) = decode_candidates(CANDIDATE, space)
    assert (prefill.max_num_batched_tokens, prefill.prefill_order) == (256, "fcfs")
    assert decode.max_num_seqs == 8
