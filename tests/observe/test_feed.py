"""The way from the engine's records to those who listen."""

import asyncio

from legato.core.outputs import FinishReason
from legato.core.step_record import Record, RequestEnded
from legato.observe.traces.feed import RecordFeed


def ended(number: int) -> Record:
    return RequestEnded(
        request_id=str(number),
        ended_s=0.0,
        finish_reason=FinishReason.STOP,
        num_output_tokens=1,
        num_cached_tokens=0,
        error=None,
    )


async def test_records_are_made_while_somebody_listens() -> None:
    demands: list[bool] = []
    feed = RecordFeed[Record](demands.append)
    feed.publish([ended(0)])
    with feed.subscribe() as first:
        with feed.subscribe() as second:
            feed.publish([ended(1)])
            assert await first.take() == await second.take() == [ended(1)]
        feed.publish([ended(2), ended(3)])
        assert await first.take() == [ended(2), ended(3)]
        assert await second.take() == []
        assert feed.is_wanted
    assert demands == [True, False]


async def test_taking_waits_for_a_record_or_the_end() -> None:
    feed = RecordFeed[Record](lambda _: None)
    subscription = feed.subscribe()
    taking = asyncio.create_task(subscription.take())
    await asyncio.sleep(0)
    assert not taking.done()
    feed.publish([ended(1)])
    assert await taking == [ended(1)]
    feed.publish([ended(2)])
    subscription.close()
    feed.publish([ended(3)])
    assert await subscription.take() == [ended(2)]
    assert await subscription.take() == []


async def test_who_does_not_take_loses_records_and_is_told_how_many() -> None:
    feed = RecordFeed[Record](lambda _: None)
    with feed.subscribe(max_records=2) as slow:
        feed.publish([ended(1)])
        feed.publish([ended(2), ended(3), ended(4)])
        assert await slow.take() == [ended(1), ended(2)]
        assert slow.num_dropped == 2
        feed.publish([ended(5)])
        assert await slow.take() == [ended(5)]


async def test_what_waits_may_be_taken_without_waiting() -> None:
    feed = RecordFeed[Record](lambda _: None)
    with feed.subscribe() as subscription:
        assert subscription.take_now() == []
        feed.publish([ended(1)])
        assert subscription.take_now() == [ended(1)]
        taking = asyncio.create_task(subscription.take())
        await asyncio.sleep(0)
        assert not taking.done()
        feed.publish([ended(2)])
        assert await taking == [ended(2)]
