import itertools

import pytest

from legato.core.slo import SloClass
from legato.scheduler.order import _PATIENCE_S, PrefillTurns
from tests.scheduler.requests import waiting_request


def test_every_tenth_chunk_is_offered_to_best_effort_requests() -> None:
    turns, served = PrefillTurns(), []
    for _ in range(30):
        served.append(turns.is_best_effort_turn)
        turns.served(best_effort=served[-1])
    assert [i for i, best_effort in enumerate(served) if best_effort] == [9, 19, 29]


def test_a_turn_waits_for_somebody_to_take_it() -> None:
    turns = PrefillTurns()
    for _ in range(15):
        turns.served(best_effort=False)
    assert turns.is_best_effort_turn
    turns.served(best_effort=True)
    assert not turns.is_best_effort_turn


def test_what_is_left_over_counts_as_a_turn_taken() -> None:
    turns = PrefillTurns()
    for best_effort in [*[False] * 8, True, *[False] * 8]:
        turns.served(best_effort=best_effort)
    assert not turns.is_best_effort_turn
    turns.served(best_effort=False)
    assert turns.is_best_effort_turn


@pytest.mark.parametrize(("ttft_s", "longest_s"), [(None, 0.5), (1.0, 0.25), (60.0, 0.5)])
def test_others_pass_one_without_room_for_most_of_the_time(
    ttft_s: float | None, longest_s: float
) -> None:
    turns = PrefillTurns()
    turns.promise([SloClass(), SloClass(ttft_s=ttft_s)])
    request = waiting_request("batch", arrival_s=0.0, prompt_len=100, slo=SloClass())
    first_s, look_s = 7.0, 1 / 64
    looks = [first_s + look_s * i for i in range(round(20 * _PATIENCE_S / look_s))]
    passes = [turns.may_pass(request, at_s) for at_s in looks]
    spans = [(may, look_s * len([*span])) for may, span in itertools.groupby(passes)]
    holds_s = [seconds for may, seconds in spans if not may]
    num_patient = round(_PATIENCE_S / (10 * longest_s))
    assert max(holds_s[:num_patient]) <= longest_s + look_s
    assert max(holds_s) > 100 * longest_s, "they grow until there is room"
    assert sum(holds_s) < 0.12 * len(looks) * look_s
