"""`python -m benchmarks speculation`: what it asks, and what it makes of the answers."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from benchmarks.runner.rounds import in_turn
from benchmarks.speculation.client import Answer, Delivery, Figures, all_run, counted, gaps_s
from benchmarks.speculation.report import plot, table
from benchmarks.speculation.rounds import (
    Measured,
    Round,
    append,
    measured_before,
    plan,
    same_answers,
    speed_ups,
)
from benchmarks.speculation.workloads import WORKLOADS, Asked, Chat, Completion

_STREAMS = (1, 4, 16, 64)
_METRICS = """
# TYPE legato:spec_decode_num_draft_tokens_total counter
legato:spec_decode_num_draft_tokens_total{drafter="own"} 30
legato:spec_decode_num_draft_tokens_total{drafter="recent"} 1.2e+01
legato:spec_decode_num_draft_tokens_created{drafter="recent"} 1.7e+09
legato:spec_decode_num_accepted_tokens_total{drafter="own",note="a } b"} 21
legato:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 9
"""


def _figures(tokens_per_s: float, answers: list[int], **fields: float) -> Figures:
    figures = Figures(
        num_tokens=100,
        seconds=100 / tokens_per_s,
        num_deliveries=50,
        tpot_s=0.01,
        slowest_tpot_s=0.012,
        itl_p50_s=0.02,
        itl_p99_s=0.03,
        num_drafted=None,
        num_accepted=None,
        answers=answers,
    )
    return msgspec.structs.replace(figures, **fields)


def _measured(number: int, off: Figures, auto: Figures, num_streams: int = 2) -> Measured:
    return Measured(
        workload="edits",
        num_streams=num_streams,
        number=number,
        itl_slo=None,
        sides={"off": off, "auto": auto},
    )


_ROUNDS = [
    _measured(0, _figures(10.0, [1, 2]), _figures(30.0, [1, 2])),
    _measured(1, _figures(40.0, [3, 4]), _figures(20.0, [3, 9])),
    _measured(2, _figures(20.0, [5, 6]), _figures(24.0, [5, 6])),
]


def _asked(rounds: list[Round]) -> Iterator[Asked]:
    for one in rounds:
        for stream in one.streams:
            yield from stream


def _prompt(asked: Asked) -> str:
    return asked.turns[0][0] if isinstance(asked, Chat) else str(asked.token_ids)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_no_two_streams_ask_alike_in_any_round_and_every_run_asks_the_same(workload: str) -> None:
    rounds = plan([workload], _STREAMS, 3.0)
    prompts = [_prompt(asked) for asked in _asked(rounds)]
    assert len(prompts) == len(set(prompts)) > 500
    assert plan([workload], _STREAMS, 3.0) == rounds
    assert {one.key[1] for one in rounds} == set(_STREAMS)
    assert len({one.key for one in rounds}) == len(rounds)


def test_edits_hold_what_is_to_be_copied_and_more_of_it_than_an_answer_takes() -> None:
    prompts = [_prompt(asked) for asked in _asked(plan(["edits"], _STREAMS, 1.0))]
    for prompt in prompts:
        _, text = prompt.split("\n\n", 1)
        assert 220 <= len(text) < 600
    assert sum("\n\n```python\n" in prompt for prompt in prompts) == len(prompts) // 2


def test_conversations_have_several_turns() -> None:
    for asked in _asked(plan(["conversations"], _STREAMS, 1.0)):
        assert isinstance(asked, Chat)
        assert len(asked.turns) >= 2


def test_what_is_drawn_behind_random_tokens_differs_from_prompt_to_prompt() -> None:
    asked = [one for one in _asked(plan(["random"], _STREAMS, 1.0)) if isinstance(one, Completion)]
    assert len({one.seed for one in asked}) == len(asked) > 150


def test_more_rounds_than_there_are_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="fewer rounds"):
        plan(["edits"], [64], 10.0)


def test_a_scale_leaves_one_round_at_least() -> None:
    assert [one.number for one in plan(["random"], [64], 0.01)] == [0]
    assert len(plan(["random"], [1], 2.0)) == 2 * len(plan(["random"], [1], 1.0))


def test_each_side_begins_in_its_turn() -> None:
    sides = ["off", "auto", "4"]
    orders = [in_turn(sides, number) for number in range(3)]
    assert [order[0] for order in orders] == sides
    assert all(sorted(order) == sorted(sides) for order in orders)


def test_ratios_are_to_the_first_side_in_the_same_round() -> None:
    assert speed_ups(_ROUNDS) == {
        "off": [1.0, 1.0, 1.0],
        "auto": pytest.approx([3.0, 0.5, 1.2]),
    }
    row = table(_ROUNDS).rows[1]
    assert row[2:6] == ["auto", "24.0", "1.20x", "0.50 to 3.00"]


def test_answers_are_held_against_the_first_sides() -> None:
    assert same_answers(_ROUNDS, "auto") == pytest.approx(5 / 6)
    assert same_answers(_ROUNDS, "off") == 1.0


def test_drafts_are_told_where_the_server_tells_them() -> None:
    drafted = _measured(
        0, _figures(10.0, [1]), _figures(10.0, [1], num_drafted=40, num_accepted=30)
    )
    off, auto = table([drafted]).rows
    assert (off[11], auto[11]) == ("", "30 of 40")


def test_counters_are_added_over_their_labels() -> None:
    assert counted(_METRICS) == {"draft": 42, "accepted": 21}
    assert counted("vllm:spec_decode_num_draft_tokens_total 3.0\n") == {"draft": 3}
    assert counted("") == {}


def _answer(*at_s: float) -> Answer:
    return Answer("", [Delivery(s, count) for count, s in enumerate(at_s, 1)])


def test_gaps_count_while_all_streams_run_and_not_from_answer_to_answer() -> None:
    early = [_answer(0.0, 3.0, 4.0), _answer(9.0, 9.5, 11.0)]
    late = [_answer(2.0, 2.25, 10.0)]
    assert all_run([early, late]) == (2.0, 10.0)
    assert gaps_s([early, late]) == [1.0, 0.5, 0.25, 7.75]


def test_streams_that_did_not_run_at_once_are_not_figures() -> None:
    with pytest.raises(RuntimeError, match="before all had begun"):
        all_run([[_answer(0.0, 1.0)], [_answer(1.5, 2.0)]])


def test_a_second_run_goes_on_behind_whole_rounds_of_the_same_sides(tmp_path: Path) -> None:
    path = tmp_path / "speculation.jsonl"
    assert measured_before(path, ["off", "auto"], None) == []
    whole = msgspec.json.encode(_ROUNDS[0])
    path.write_bytes(whole + b"\n" + whole[: len(whole) // 2])
    assert measured_before(path, ["off", "auto"], None) == _ROUNDS[:1]
    append(path, _ROUNDS[1])
    append(path, _ROUNDS[2])
    assert measured_before(path, ["off", "auto"], None) == _ROUNDS
    assert measured_before(path, ["off", "4"], None) == []
    assert measured_before(path, ["off", "auto"], "100ms") == []


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    more = _measured(0, _figures(10.0, [1, 2]), _figures(30.0, [1, 2]), num_streams=4)
    plot([*_ROUNDS, more]).savefig(tmp_path / "speculation.png")
    assert (tmp_path / "speculation.png").read_bytes().startswith(b"\x89PNG")
