"""When an engine that died is started again."""

import pytest

from legato.engine.errors import EngineDeadError
from legato.engine.process.restarts import Restarts
from legato.executor.simulated import VirtualClock


def test_three_short_lives_in_a_row_are_enough() -> None:
    clock = VirtualClock()
    restarts = Restarts(loading_s=5.0, clock=clock)
    for served_s in (3600.0, 59.0, 1.0, 61.0, 0.0, 59.0):
        clock.advance_to(clock() + served_s)
        restarts.note_death()
        clock.advance_to(clock() + 1000.0)  # loading is not life
        restarts.note_ready()
    with pytest.raises(EngineDeadError, match="3 times in a row"):
        restarts.note_death()
    assert restarts.count == 6


def test_engines_that_die_while_loading_have_not_lived() -> None:
    clock = VirtualClock()
    restarts = Restarts(loading_s=5.0, clock=clock)
    clock.advance_to(100.0)
    restarts.note_death()
    for _ in range(2):
        clock.advance_to(clock() + 100.0)
        restarts.note_death()
    with pytest.raises(EngineDeadError):
        restarts.note_death()


def test_clients_are_told_to_come_back_when_the_next_one_should_serve() -> None:
    clock = VirtualClock()
    restarts = Restarts(loading_s=5.0, clock=clock)
    clock.advance_to(100.0)
    restarts.note_death()
    assert restarts.seconds_left == 5.0
    clock.advance_to(103.0)
    assert restarts.seconds_left == 2.0
    clock.advance_to(110.0)
    assert restarts.seconds_left == 1.0
