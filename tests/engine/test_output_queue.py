"""The queue between the engine and a reader."""

import pytest

from legato.core.outputs import RequestOutput
from legato.engine.errors import EngineDeadError, SlowReaderError
from legato.engine.frontend.output_queue import OutputQueue


def output(index: int) -> RequestOutput:
    return RequestOutput(request_id="r", new_token_ids=(index,))


async def test_outputs_come_in_order_and_then_the_end() -> None:
    queue = OutputQueue(3)
    assert all(queue.put(output(i), i) for i in range(3))
    queue.close(EngineDeadError("gone"))
    assert [await queue.get() for _ in range(3)] == [(output(i), i) for i in range(3)]
    with pytest.raises(EngineDeadError):
        await queue.get()
    assert not queue.put(output(3), 3)


async def test_one_too_many_drops_them_all() -> None:
    queue = OutputQueue(3)
    assert all(queue.put(output(i), i) for i in range(3))
    assert await queue.get() == (output(0), 0)
    assert queue.put(output(3), 3)
    assert not queue.put(output(4), 4)
    assert not queue.put(output(5), 5)
    with pytest.raises(SlowReaderError, match="3 of its tokens"):
        await queue.get()
