"""Each call of the engine's loop and of its scheduler raises once: an error of one is its own.

No test lists the calls: a run without errors finds them.
"""

import logging
import zlib
from collections.abc import Iterator

import pytest

from legato.core.outputs import FinishReason
from legato.core.plan import FIRST_STATE
from legato.engine.calibration import recalibration
from tests.engine.walked_engine import Server, walk

KINDS = [(1, False), (2, False), (2, True)]
"""Steps in flight, and whether the model has recurrent layers."""
ENDS = {"aborted early": FinishReason.ABORT, "aborted late": FinishReason.ABORT}
"""Other requests end by their length."""
NOT_THE_ENGINES = {"canary", "calibration-fill"}
"""Requests of the executor's tests, which it may keep."""


@pytest.fixture(autouse=True)
def small_and_silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Recalibrate in a small cache; do not format some thousand tracebacks."""
    monkeypatch.setattr(recalibration, "_FEWEST_TOKENS", 16)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def check(server: Server, *, is_undisturbed: bool = False) -> None:
    """Only one request may have failed, and nothing is left of any."""
    failed = [name for name, ends in server.reasons.items() if FinishReason.ERROR in ends]
    assert len(failed) <= 1
    for name, ends in server.reasons.items():
        assert server.tokens[name] == server.expected(name)
        if name not in failed:
            assert ends == [ENDS.get(name, FinishReason.LENGTH)], name
    assert "after" not in failed
    engine, stats = server.engine, server.engine.stats
    assert bool(stats.num_contained_errors + stats.num_failed_steps) is not is_undisturbed
    assert server.kv.num_free_blocks == server.kv.num_blocks
    assert not [*server.kv._tables]
    if server.states is not None:
        kept = server.states.checkpoints.slots
        assert len(server.states._free) + len(kept) == server.states.num_slots - FIRST_STATE
    assert not server.scheduler.has_work
    assert not server.scheduler._requests
    assert not engine._intake._unfinished
    assert not any(tenant.num_waiting or tenant.num_running for tenant in stats.tenants)
    assert not server.drafter.num_told
    dispatch = server.scheduler._dispatch
    assert not dispatch._known_to_executor
    left = server.executor.known - NOT_THE_ENGINES
    assert left <= {*dispatch._ended}, "with the next plan the executor forgets these"


@pytest.mark.parametrize(("depth", "has_states"), KINDS)
def test_the_run_uses_all_parts(depth: int, *, has_states: bool) -> None:
    server, calls = walk(depth, has_states=has_states)
    check(server, is_undisturbed=True)
    stats = server.engine.stats
    assert stats.num_preemptions
    assert stats.num_prefix_cache_hits
    callees = {call.callee.split(".")[0] for call in calls.counts}
    parts = {"grammars", "recalibration", "calibration", "drafting", "manager", "recorder"}
    assert parts <= callees
    assert len(calls.counts) > 100


def test_a_call_that_raises_once_ends_one_request_at_most() -> None:
    found = {kind: walk(kind[0], has_states=kind[1])[1].counts for kind in KINDS}
    num_raised, all_calls = 0, sorted(set().union(*found.values()))
    for call in all_calls:
        chance = zlib.crc32(f"{call}".encode())  # any kind and place, but always the same ones
        kinds = [kind for kind in KINDS if call in found[kind]]
        kind = depth, has_states = kinds[chance % len(kinds)]
        fault = call, chance // len(kinds) % found[kind][call]
        try:
            server, raising = walk(depth, has_states=has_states, at=fault)
            if raising.has_raised:
                check(server)
        except Exception as error:
            error.add_note(f"{fault} raised in {kind}")
            raise
        num_raised += raising.has_raised
    assert num_raised > 0.9 * len(all_calls), "a grammar is looked for more or less often"
