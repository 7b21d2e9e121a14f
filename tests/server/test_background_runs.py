"""A response in the background ends once, however often and whenever it is cancelled."""

import asyncio
import json

from hypothesis import given
from hypothesis import strategies as st

from legato.core.outputs import FinishReason
from tests.profiles import examples
from tests.server.background_runs import background_run, context, delta, iterations

LONG = "y" * 2**18
"""A text whose JSON is made in several turns of the event loop."""


@examples(60)
@given(
    gaps=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    num_deltas=st.integers(0, 2),
    is_complete=st.booleans(),
)
def test_a_response_ends_once(gaps: list[int], num_deltas: int, is_complete: bool) -> None:
    ends: list[str] = []

    def finish(body: bytearray) -> bool:
        ends.append(json.loads(b"".join(body) if isinstance(body, list) else body)["status"])
        return True

    async def main() -> None:
        a_context = context()
        run = background_run(a_context, finish)
        await iterations(gaps[0])
        submissions = a_context.engine.submissions
        if submissions:
            for _ in range(num_deltas):
                submissions[0].take(0, delta(LONG))
            if is_complete:
                submissions[0].take(0, delta("!", FinishReason.STOP))
        clients = []
        for gap in gaps:
            clients.append(asyncio.create_task(run.cancelled()))
            await iterations(gap)
        await asyncio.wait_for(run.begun(), 60)
        await asyncio.wait(clients, timeout=60)
        assert run.log is not None
        told = b"".join([data async for data in run.log.after(-1)])
        assert told.count(b"event: response.completed") == ends.count("completed")

    asyncio.run(main())
    assert ends in (["cancelled"], ["completed"])
