"""How far spans say that requests have come."""

import pytest

from legato.core.step_record import RequestArrived, RequestEnded
from legato.observe.traces.spans import Progresses
from tests.observe.recorded import answer_record, recorded_run


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_requests_last_token_is_its_end(depth: int) -> None:
    """Also where a step that was in flight then holds it."""
    records = recorded_run([(0.0, 9, 30), (0.0, 5, 30)], depth=depth, is_random=True)
    progresses = Progresses()
    for record in records:
        progresses.note(record)
    arrived = {r.request_id: r.arrived_s for r in records if isinstance(r, RequestArrived)}
    ended = {r.request_id: r.ended_s for r in records if isinstance(r, RequestEnded)}
    for name in ("0", "1"):
        [progress] = progresses.take(answer_record(name))
        assert progress.arrived_s == arrived[name]
        assert progress.admitted_s is not None
        assert progress.first_token_s is not None
        assert progress.admitted_s < progress.first_token_s < ended[name]
        assert progress.last_token_s == ended[name]
        assert progresses.take(answer_record(name)) == []
