"""How far spans say that requests have come."""

import pytest

from legato.core.step_record import RequestArrived, RequestEnded, StepRecord
from legato.observe.traces.spans import Progresses, span_attributes
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


def test_a_span_tells_of_drafts_where_there_were_any() -> None:
    records = recorded_run([(0.0, 9, 30), (0.0, 5, 1)], speculative=4, vocab_size=2)
    progresses = Progresses()
    for record in records:
        progresses.note(record)
    chunks = [c for r in records if isinstance(r, StepRecord) for c in r.chunks]
    told = [
        span_attributes(answer_record(name), progresses.take(answer_record(name)), "m")
        for name in ("0", "1")
    ]
    assert told[0]["legato.usage.draft_tokens"] == sum(chunk.num_drafts for chunk in chunks)
    right = sum(chunk.num_accepted for chunk in chunks)
    assert told[0]["legato.usage.accepted_draft_tokens"] == right > 0
    assert not any("draft" in name for name in told[1])
