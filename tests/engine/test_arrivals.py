"""A flood of requests delays no step for long, and none of them is lost."""

from collections.abc import Sequence

from legato.core.outputs import FinishReason, RequestOutput
from legato.core.request import AbortRequest, AddRequest, Event
from legato.engine.main import Arrivals
from tests.engine.test_engine_loop import NUM_TOKENS, Engine, drain, reasons, request

ADD_S = 0.002
NAMES = [f"r{i}" for i in range(24)]


class SlowlyTaking(Engine):
    """Each request takes a while to forecast. Attributes: taken: ids of requests, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[str] = []

    def apply(self, events: Sequence[Event]) -> list[RequestOutput]:
        added = [event.request_id for event in events if isinstance(event, AddRequest)]
        self.taken += added
        self.clock.advance_to(self.clock() + ADD_S * len(added))
        return super().apply(events)


def flood() -> list[Event]:
    return [request(name, 8) for name in NAMES]


def test_an_idle_engine_takes_all() -> None:
    engine = SlowlyTaking()
    arrivals = Arrivals(engine, engine.clock)
    assert arrivals.take(flood()) == (len(NAMES), [])
    assert not arrivals
    assert engine.taken == NAMES


def test_no_step_waits_for_more_than_a_few() -> None:
    engine = SlowlyTaking()
    arrivals = Arrivals(engine, engine.clock)
    outputs = engine.step([request("stream", 8, max_tokens=30)])
    events, counts = flood(), list[int]()
    while arrivals or events:
        begins_s = engine.clock()
        num_taken, ended = arrivals.take(events)
        assert engine.clock() - begins_s < 0.005 + 2 * ADD_S
        counts.append(num_taken)
        outputs, events = outputs + ended + engine.step(), []
    assert sum(counts) == len(NAMES)
    assert min(counts) >= 1
    assert max(counts) == 3
    assert engine.taken == ["stream", *NAMES]
    ends = reasons(outputs + drain(engine))
    assert ends == dict.fromkeys(["stream", *NAMES], FinishReason.LENGTH)


def test_an_abort_waits_for_no_request() -> None:
    engine = SlowlyTaking()
    arrivals = Arrivals(engine, engine.clock)
    engine.step([request("stream", 8)])
    aborts = [AbortRequest(request_id=name) for name in ("stream", NAMES[-1])]
    num_taken, ended = arrivals.take([*flood(), *aborts])
    assert reasons(ended) == {"stream": FinishReason.ABORT, NAMES[-1]: FinishReason.ABORT}
    assert engine.taken[:2] == ["stream", NAMES[-1]]
    outputs = list[RequestOutput]()
    while arrivals:
        more, ended = arrivals.take([])
        num_taken += more
        outputs += ended + engine.step()
    outputs += drain(engine)
    assert num_taken == len(NAMES)
    assert sum(len(output.new_token_ids) for output in outputs) == NUM_TOKENS * (len(NAMES) - 1)
