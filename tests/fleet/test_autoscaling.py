"""How many replicas promises take."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.replica_state import ReplicaState
from legato.core.slo import SloClass
from legato_fleet.autoscaling import STRAIN, keep_promises, strain, wanted_replicas

PROMISE = SloClass(itl_s=0.1, ttft_s=2.0)


def state(**told: Any) -> ReplicaState:
    return ReplicaState(num_blocks=10, num_free_blocks=10, block_size=16, **told)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"delay_s": 1.0, "itl_s": 0.02}, 0.5),
        ({"delay_s": 0.1, "itl_s": 0.09}, 0.9),
        ({"num_waiting": 40, "num_running": 40}, 0.0),
    ],
)
def test_strain_is_the_share_of_the_promise_that_is_used_up(
    told: dict[str, Any], expected: float
) -> None:
    assert strain(state(**told), [SloClass(), PROMISE]) == pytest.approx(expected)


def test_gaps_between_tokens_strain_those_that_send_them() -> None:
    told = state(delay_s=0.2, itl_s=0.09)
    assert strain(told, [PROMISE], "prefill") == pytest.approx(0.1)
    assert strain(told, [PROMISE], "decode") == pytest.approx(0.9)


def test_without_promises_requests_that_wait_count() -> None:
    assert strain(state(num_waiting=4, delay_s=9.0), [SloClass()]) == 0.5


@given(strains=st.lists(st.floats(0.0, 20.0), min_size=1, max_size=20))
def test_more_where_promises_are_in_danger_and_fewer_where_that_stays_safe(
    strains: list[float],
) -> None:
    wanted, num_replicas = wanted_replicas(strains), len(strains)
    assert wanted >= 1
    if wanted > num_replicas:
        assert sum(strains) / wanted < sum(strains) / num_replicas > 0.8
    if wanted < num_replicas:
        assert sum(strains) / wanted < 0.5
        assert wanted_replicas([sum(strains) / wanted] * wanted) == wanted or wanted > 1


def context(strains: dict[str, float], *, current: int, most: int = 8) -> Any:
    return SimpleNamespace(
        aggregated_metrics={STRAIN: strains},
        current_num_replicas=current,
        target_num_replicas=current,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=most,
    )


def test_a_policy_waits_for_new_replicas_to_tell_and_keeps_its_bounds() -> None:
    assert keep_promises(context({"a": 5.0}, current=2))[0] == 2
    assert keep_promises(context({"a": 5.0, "b": 5.0}, current=2))[0] == 8
    assert keep_promises(context({"a": 0.0, "b": 0.1}, current=2))[0] == 1
    assert keep_promises(context({"a": 0.0}, current=1))[0] == 1
