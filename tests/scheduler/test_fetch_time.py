"""A request whose blocks come from another engine is foreseen by what the link makes of them."""

import pytest

from legato.core.outputs import FinishReason
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_time import StepTimeModel
from legato_fleet.routing.replica_view import ReplicaView
from tests.scheduler.harness import Harness
from tests.scheduler.step_times import calibrate

TOKEN_S = 0.01
"""Of the link: far more than of a step."""
COSTS = StepCosts(step_s=0.01, decode_row_s=0.001, row_s=(0.0002,) * 5, area_s=1e-7, sample_s=1e-4)


@pytest.fixture
def harness() -> Harness:
    """Where prompts are fetched; of the link, nothing is known."""
    return Harness(
        budget=256,
        num_blocks=1000,
        max_model_len=1000,
        step_time=StepTimeModel(calibrate(COSTS, 1000)),
        ttft_slo_s=2.0,
        shed_load=True,
    )


def fetch(harness: Harness, request_id: str, num_tokens: int) -> None:
    """Have a prompt of so many tokens, and one more, come block by block."""
    harness.add(request_id, num_tokens + 1, 1, kv_role="fetch")
    harness.step()
    for end in range(4, num_tokens + 1, 4):
        harness.arrive(request_id, end, is_over=end == num_tokens, read_s=4 * TOKEN_S)
    harness.drain()


def is_refused(harness: Harness, request_id: str) -> bool:
    return harness.finish_reasons[request_id] == [FinishReason.REFUSED]


def test_what_takes_longer_than_promised_to_come_is_refused(harness: Harness) -> None:
    harness.add("unknown", 400, 1, kv_role="fetch")
    assert not is_refused(harness, "unknown")
    harness.abort("unknown")
    fetch(harness, "known", 100)
    assert harness.scheduler.state(harness.clock()).fetch_token_s == pytest.approx(TOKEN_S)
    harness.add("short", 100, 1, kv_role="fetch")
    harness.add("long", 400, 1, kv_role="fetch")
    harness.add("computed", 400, 1)
    assert [is_refused(harness, it) for it in ("short", "long", "computed")] == [False, True, False]


def test_it_waits_behind_what_is_on_its_way_and_not_for_what_is_here(harness: Harness) -> None:
    fetch(harness, "known", 100)
    prompt = harness.added["known"].prompt_token_ids
    harness.add("on its way", 161, 1, kv_role="fetch")
    harness.step()
    harness.add("behind", 101, 1, kv_role="fetch")
    assert is_refused(harness, "behind")
    harness.add("here", prompt=[*prompt, 1, 2], max_tokens=1, kv_role="fetch")
    assert not is_refused(harness, "here")


def test_a_router_believes_what_a_replica_has_measured(harness: Harness) -> None:
    view = ReplicaView("a", "decode", transfer_token_s=1.0)
    view.note_state(harness.scheduler.state(0.0), 0.0)
    assert view.token_s == 1.0
    fetch(harness, "known", 100)
    view.note_state(harness.scheduler.state(1.0), 1.0)
    assert view.token_s == pytest.approx(TOKEN_S)
