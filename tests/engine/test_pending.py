"""Requests that wait to be sent to an engine: tenants take turns, and aborts are never late."""

import asyncio
import itertools
import socket
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from legato.core.request import AbortRequest, AddRequest, Event
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.token_ids import token_array
from legato.engine.process.channel import Channel
from legato.engine.process.child_process import ChildProcess
from legato.engine.process.engine_messages import Taken
from legato.engine.process.engine_process import EngineProcess
from legato.engine.process.pending import MAX_SENT, MAX_SENT_TOKENS, PendingRequests


def request(request_id: str, tenant: str = "default", num_tokens: int = 1) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=token_array([1] * num_tokens),
        params=SamplingParams(max_tokens=1),
        service=ServiceParams(tenant=tenant),
    )


def take_all(pending: PendingRequests[AddRequest]) -> list[str]:
    return [taken.request_id for taken in pending.take(10**6, 10**9)]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=60), st.data())
def test_tenants_and_their_prompts_take_turns(
    came: list[tuple[str, int]], data: st.DataObject
) -> None:
    """At any time, no tenant has had two turns more than another that still waits."""
    pending = PendingRequests[AddRequest]()
    added: defaultdict[str, list[str]] = defaultdict(list)
    for index, (tenant, prompt) in enumerate(came):
        request_id = f"{tenant}{prompt}-{index}"
        pending.add(one := request(request_id, tenant), one)
        added[tenant].append(request_id)
    dropped = data.draw(st.sets(st.sampled_from(["none", *itertools.chain(*added.values())])))
    assert all(pending.drop(one) == (one != "none") for one in dropped)
    assert not any(map(pending.drop, dropped))

    left = {tenant: [one for one in ids if one not in dropped] for tenant, ids in added.items()}
    order = take_all(pending)
    assert sorted(order) == sorted(itertools.chain(*left.values()))
    turns = Counter[str]()
    for request_id in order:
        turns[request_id[0]] += 1
        waiting = [tenant for tenant, ids in left.items() if turns[tenant] < len(ids)]
        for one in waiting:
            assert turns[request_id[0]] <= turns[one] + 1
    for prompt in {request_id.partition("-")[0] for request_id in order}:
        of_prompt = [one for one in order if one.startswith(f"{prompt}-")]
        assert of_prompt == sorted(of_prompt, key=lambda one: int(one.partition("-")[2]))


def test_other_prompts_of_a_tenant_pass_one_with_many_completions() -> None:
    pending = PendingRequests[AddRequest]()
    for one in [request(f"0-many-{i}") for i in range(100)] + [request("1-one-0")]:
        pending.add(one, one)
    assert take_all(pending)[:3] == ["0-many-0", "1-one-0", "0-many-1"]


def test_a_message_is_taken_whatever_its_size() -> None:
    pending = PendingRequests[AddRequest]()
    for index in range(3):
        pending.add(one := request(str(index), num_tokens=10), one)
    assert len(pending.take(10, 1)) == 1
    assert len(pending.take(10, 11)) == 2
    assert not pending
    assert pending.take(10, 1) == []


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[EngineProcess, Channel]]:
    """The front end's side of an engine process, and the engine's end of its real socket."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    idle = ChildProcess((sys.executable, "-c", "import time; time.sleep(600)"), theirs.fileno(), {})
    process = EngineProcess(idle, reader, writer)

    async def follow() -> None:
        async for _ in process.steps():
            pass

    following = asyncio.create_task(follow())
    try:
        yield process, Channel(theirs, Event)
    finally:
        process.abandon()
        await following
        await process.close()
        theirs.close()


async def taken_in(channel: Channel) -> list[Event]:
    """What the engine finds between two steps."""
    await settle()  # the front end writes what it may
    messages: list[Event] = []
    while more := channel.receive(wait_s=0):  # each reads for a millisecond at most
        messages += more
    if num_requests := sum(isinstance(message, AddRequest) for message in messages):
        channel.send(Taken(num_requests))
    await settle()
    return messages


async def settle() -> None:
    """Let the loop go round so often that what is read is also answered, on a busy machine too."""
    for _ in range(20):
        await asyncio.sleep(0.001)


def ids(messages: list[Event]) -> list[str]:
    return [msgspec.structs.asdict(message)["request_id"] for message in messages]


async def test_a_flood_of_completions_lets_others_and_aborts_pass() -> None:
    """A tenant's request comes in with the next messages, and an abort in the very next."""
    num_tokens = 8000
    async with connected() as (process, channel):
        for index in range(1000):
            process.send(request(f"0-flood-{index}", "a", num_tokens))
        first = await taken_in(channel)
        assert 1 < len(first) <= MAX_SENT
        assert len(first) <= MAX_SENT_TOKENS // num_tokens + 1
        process.send(request("1-other-0", "b"))
        process.send(AbortRequest(request_id="0-flood-0"))
        seen = ids(await taken_in(channel)) + ids(await taken_in(channel))
        assert {"1-other-0", "0-flood-0"} <= set(seen)
        assert len(seen) < 3 * MAX_SENT

        for index in range(1000):
            process.send(AbortRequest(request_id=f"0-flood-{index}"))
        left = await taken_in(channel) + await taken_in(channel) + await taken_in(channel)
        added = [one for one in left if isinstance(one, AddRequest)]
        assert len(added) <= MAX_SENT, "requests that were aborted before they were sent"
        process.send(request("2-next-0", "a"))
        assert ids(await taken_in(channel)) == ["2-next-0"]


async def test_requests_are_sent_while_the_engine_computes() -> None:
    """One that comes during a step is there when the step ends, and need not wait for another."""
    async with connected() as (process, channel):
        for index in range(MAX_SENT):
            process.send(request(f"{index}-one-0"))
        assert len(await taken_in(channel)) == MAX_SENT


async def test_a_process_that_has_not_ended_has_words_for_it() -> None:
    """A download that cannot be killed in time ends with these."""
    async with connected() as (process, _):
        assert process._process.end == "it has not ended"
