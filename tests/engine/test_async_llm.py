"""The engine of the server in an asyncio program: several requests at once, and what ends them."""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing

import numpy as np
import psutil
import pytest

from legato import AsyncEngineArgs, AsyncLLM, SamplingParams
from legato.core.errors import ConfigError, InvalidRequestError
from legato.core.outputs import FinishReason
from legato.core.slo import ServiceParams
from legato.engine.errors import EngineDeadError, OverloadedError
from legato.llm.results import Generation
from tests.exact import EXACT_MODEL
from tests.forks.process import runs

pytestmark = pytest.mark.usefixtures("forked_engines")

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
LONG = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)
SETTINGS = {
    **EXACT_MODEL,
    "kv_cache_memory_bytes": 2**28,
    "max_model_len": 2100,
    "num_threads": 1,
    "max_num_seqs": 4,
    "max_waiting": 4,
}


@pytest.fixture
async def llm() -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM.from_engine_args(AsyncEngineArgs(**SETTINGS)) as llm:
        yield llm
    assert not engines()


def engines() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if runs(child, "legato.engine.main")]


async def last(llm: AsyncLLM, prompt: str, params: SamplingParams = GREEDY) -> Generation:
    return await end(llm.generate(prompt, params))


async def end(generations: AsyncIterator[Generation]) -> Generation:
    [*_, whole] = [generation async for generation in generations]
    return whole


async def idle(llm: AsyncLLM) -> None:
    while llm.stats.num_running or llm.stats.num_waiting:
        await asyncio.sleep(0.01)


async def test_what_comes_and_what_ends_it(llm: AsyncLLM) -> None:
    """In one test, since each start of an engine takes seconds."""
    await requests_without_an_id_are_counted(llm)
    await it_grows_and_ends(llm)
    await several_at_once_are_what_each_is_alone(llm)
    await conversations_are_answered(llm)
    await leaving_and_cancelling_free_the_request(llm)
    await an_abort_ends_what_has_come(llm)
    await errors_are_exceptions(llm)
    await a_dead_engine_ends_what_has_begun_and_is_replaced(llm)


async def requests_without_an_id_are_counted(llm: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=1)
    ids = [step.request_id for _ in range(3) async for step in llm.generate("Hi", params)]
    assert ids == ["0", "1", "2"]
    async with aclosing(llm.generate("Hi", LONG, "3")) as running:
        await anext(running)
        assert (await last(llm, "Hi", params)).request_id == "4"


async def it_grows_and_ends(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, n=2, logprobs=0)
    steps = [generation async for generation in llm.generate("Once upon a time", params, "mine")]
    for before, after in itertools.pairwise(steps):
        assert not before.finished
        for old, new in zip(before.outputs, after.outputs, strict=True):
            assert new.text.startswith(old.text)
            assert new.token_ids[: len(old.token_ids)] == old.token_ids
    whole = steps[-1]
    assert whole.finished
    assert (whole.request_id, whole.prompt) == ("mine", "Once upon a time")
    assert [len(output.token_ids) for output in whole.outputs] == [8, 8]
    assert [len(output.logprobs or ()) for output in whole.outputs] == [8, 8]
    tokenizer = await llm.get_tokenizer()
    assert tokenizer.decode(whole.outputs[0].token_ids) == whole.outputs[0].text
    assert tokenizer.encode("Once upon a time") == whole.prompt_token_ids


async def several_at_once_are_what_each_is_alone(llm: AsyncLLM) -> None:
    prompts = ["One two three", "The sky is", "In the beginning", "Once"]
    alone = [(await last(llm, prompt)).outputs[0].token_ids for prompt in prompts]
    together = await asyncio.gather(*(last(llm, prompt) for prompt in prompts))
    assert [generation.outputs[0].token_ids for generation in together] == alone


async def conversations_are_answered(llm: AsyncLLM) -> None:
    chat = llm.chat(QUESTION, GREEDY, service=ServiceParams(slo_class="batch"))
    *parts, answer = [generation async for generation in chat]
    assert answer.outputs[0].text == "The capital of France is Paris."
    assert {part.outputs[0].message for part in parts} == {None}
    assert answer.outputs[0].message is not None
    assert answer.outputs[0].message.content == answer.outputs[0].text
    begun = [*QUESTION, {"role": "assistant", "content": "The capital is"}]
    rest = llm.chat(begun, GREEDY, continue_final_message=True, add_generation_prompt=False)
    assert (await end(rest)).outputs[0].text.startswith(" Paris")


async def leaving_and_cancelling_free_the_request(llm: AsyncLLM) -> None:
    async with aclosing(llm.generate("Once", LONG)) as generations:
        async for _ in generations:
            assert llm.stats.num_running == 1
            break
    await idle(llm)

    begun = asyncio.Event()

    async def read() -> None:
        async for _ in llm.generate("Once", LONG):
            begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await idle(llm)


async def an_abort_ends_what_has_come(llm: AsyncLLM) -> None:
    num_tokens = 0
    async for generation in llm.generate("Once", LONG, "long"):
        if not generation.finished:
            num_tokens = len(generation.outputs[0].token_ids)
            await llm.abort(["unknown", "long"])
    assert generation.outputs[0].finish_reason is FinishReason.ABORT
    assert len(generation.outputs[0].token_ids) == num_tokens > 0
    await idle(llm)


async def errors_are_exceptions(llm: AsyncLLM) -> None:
    for wrong in ({"max_tokens": 1.5}, {"top_k": True}, {"temperature": 2**70}):
        with pytest.raises(InvalidRequestError, match="wrong type"):  # and the engine lives on
            await last(llm, "Hi", SamplingParams(**wrong))
    few = SamplingParams(max_tokens=np.int64(2), temperature=np.float32(0), ignore_eos=True)  # type: ignore[arg-type]
    assert len((await last(llm, "Hi", few)).outputs[0].token_ids) == 2
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        await last(llm, "")
    async with aclosing(llm.generate("Once", LONG, "taken")) as running:
        await anext(running)
        with pytest.raises(InvalidRequestError, match="'taken' runs already"):
            await anext(llm.generate("Once", GREEDY, "taken"))
        outcomes = await asyncio.gather(
            *(last(llm, "Once") for _ in range(12)), return_exceptions=True
        )
    refused = [outcome for outcome in outcomes if isinstance(outcome, OverloadedError)]
    served = [outcome for outcome in outcomes if isinstance(outcome, Generation)]
    assert refused
    assert len(refused) + len(served) == 12
    await idle(llm)


async def a_dead_engine_ends_what_has_begun_and_is_replaced(llm: AsyncLLM) -> None:
    generations = llm.generate("Once", LONG)
    await anext(generations)
    [engine] = engines()
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="while it held this request"):
        await end(generations)
    with pytest.raises(EngineDeadError, match="restarted") as refusal:
        await llm.check_health()
    assert refusal.value.retry_after_s is not None
    while True:
        try:
            await llm.check_health()
            break
        except EngineDeadError:
            await asyncio.sleep(0.01)
    assert (await last(llm, "Once")).finished


async def test_token_ids_need_no_tokenizer_and_the_first_request_starts_the_engine() -> None:
    llm = AsyncLLM(**SETTINGS, skip_tokenizer_init=True)  # type: ignore[arg-type]
    try:
        generation = await end(llm.generate({"prompt_token_ids": [504, 6376, 314]}, GREEDY))
        assert len(generation.outputs[0].token_ids) > 0
        assert generation.outputs[0].text == ""
        with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
            await last(llm, "The sky is")
        with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
            await llm.get_tokenizer()
    finally:
        await llm.shutdown()
    with pytest.raises(EngineDeadError, match="stopped"):
        await anext(llm.generate({"prompt_token_ids": [1]}, GREEDY))


async def test_what_cannot_be_started() -> None:
    with pytest.raises(TypeError, match="did you mean max_model_len"):
        AsyncLLM(max_model_length=5)
    with pytest.raises(ConfigError, match="no-such-folder"):
        await AsyncLLM("./no-such-folder").start()
    assert not engines()
    with pytest.raises(RuntimeError, match="has not been started"):
        await AsyncLLM().check_health()


async def test_another_event_loop_gets_an_error(llm: AsyncLLM) -> None:
    async def ask() -> Generation:
        return await last(llm, "The sky is")

    def elsewhere() -> None:
        for call in (ask, llm.start, llm.shutdown):
            with pytest.raises(RuntimeError, match="belongs to another event loop"):
                asyncio.run(call())

    await llm.start()
    await asyncio.to_thread(elsewhere)
    assert (await ask()).finished
