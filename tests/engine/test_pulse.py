"""A process that is stopped is told from one that is busy or idle."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from hypothesis import given
from hypothesis import strategies as st

from legato.engine.process.pulse import Pulse

_TICK_S = 0.2


@contextmanager
def running(code: str) -> Iterator[psutil.Process]:
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            yield psutil.Process(process.pid)
        finally:
            process.kill()


def test_a_process_that_computes_is_never_stuck() -> None:
    with running("while True: pass") as process:
        pulse = Pulse(process.pid, 2)
        for _ in range(6):
            time.sleep(_TICK_S)
            pulse.tick()
            assert not pulse.is_stuck


def test_a_stopped_process_is_stuck_until_it_goes_on() -> None:
    with running("while True: pass") as process:
        time.sleep(_TICK_S)
        process.suspend()
        pulse = Pulse(process.pid, 3)
        pulse.tick()  # what it had computed before
        for num_silent in range(1, 4):
            assert not pulse.is_stuck
            pulse.tick()
            assert pulse.is_suspect == (num_silent >= 2)
        assert pulse.is_stuck
        process.resume()
        time.sleep(_TICK_S)
        pulse.tick()
        assert not pulse.is_suspect


def test_an_idle_process_that_answers_is_not_stuck() -> None:
    with running("import time; time.sleep(600)") as process:
        time.sleep(_TICK_S)
        pulse = Pulse(process.pid, 2)
        for _ in range(6):
            pulse.note_answer()
            pulse.tick()
            assert not pulse.is_suspect


def test_a_process_that_is_gone_is_stuck() -> None:
    with running("pass") as process:
        pid = process.pid
        process.wait(60)
    pulse = Pulse(pid, 2)
    for _ in range(4):
        pulse.tick()
    assert pulse.is_stuck


_PREDICTED_S = st.floats(0.1, 20.0)


@given(bound=st.integers(1, 50), looks=st.lists(st.none() | st.just("answer") | _PREDICTED_S))
def test_a_process_is_stuck_after_its_bound_of_looks_without_an_answer(
    bound: int, looks: list[str | float | None]
) -> None:
    """Whether it computes or not. Args: looks: an answer, a long step or nothing before each."""
    pulse = Pulse(psutil.Process().pid, 10**6, bound)
    pulse.tick()  # it counts as having answered
    num_unanswered, allowed = 0, float(bound)
    for look in looks:
        if look == "answer":
            pulse.note_answer()
            num_unanswered, allowed = -1, float(bound)
        elif isinstance(look, float):
            pulse.note_step(look)
            allowed = max(bound, 10 * look)
        pulse.tick()
        num_unanswered += 1
        assert pulse.is_stuck == (num_unanswered >= allowed)
        if pulse.is_stuck:
            assert pulse.is_suspect
            assert pulse.complaint == f"has not answered for {num_unanswered} s"
