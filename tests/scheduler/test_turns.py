from legato.scheduler.turns import PrefillTurns


def test_every_tenth_chunk_is_offered_to_best_effort_requests() -> None:
    turns, served = PrefillTurns(), []
    for _ in range(30):
        served.append(turns.is_best_efforts)
        turns.served(best_effort=served[-1])
    assert [i for i, best_effort in enumerate(served) if best_effort] == [9, 19, 29]


def test_a_turn_waits_for_somebody_to_take_it() -> None:
    turns = PrefillTurns()
    for _ in range(15):
        turns.served(best_effort=False)
    assert turns.is_best_efforts
    turns.served(best_effort=True)
    assert not turns.is_best_efforts


def test_what_is_left_over_counts_as_a_turn_taken() -> None:
    turns = PrefillTurns()
    for best_effort in [*[False] * 8, True, *[False] * 8]:
        turns.served(best_effort=best_effort)
    assert not turns.is_best_efforts
    turns.served(best_effort=False)
    assert turns.is_best_efforts
