"""Calls of `LLM` from several threads, and within each other, are served at once."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from legato import LLM, SamplingParams
from legato.core.outputs import RequestOutput
from legato.core.request import AddRequest
from legato.core.token_ids import token_array
from legato.engine.errors import EngineFaultError
from legato.llm.shared_engine import Inbox, SharedEngine
from tests.exact import EXACT_MODEL

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PATIENCE_S = 300


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**EXACT_MODEL, num_threads=1, kv_cache_memory_bytes=2**27, max_model_len=512)


@pytest.fixture(autouse=True)
def _all_end(llm: LLM) -> Iterator[None]:
    """No request is left behind, and no call's share of an output."""
    yield
    assert not llm._engine.has_work
    assert not llm._shared._inboxes


def prompt(seed: int) -> Any:
    return {"prompt_token_ids": [1000 + 7 * i + 13 * seed for i in range(40)]}


def generated(llm: LLM, seed: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=("the",))
    whole = llm.generate([prompt(seed), prompt(seed + 1)], params, use_tqdm=False)
    return [token_id for one in whole for token_id in one.outputs[0].token_ids]


def embedded(llm: LLM, seed: int) -> list[float]:
    return llm.embed(prompt(seed), use_tqdm=False)[0].outputs.embedding


def chatted(llm: LLM, seed: int) -> str:
    question = [{"role": "user", "content": f"How much is {seed} and {seed}?"}]
    return llm.chat(question, GREEDY, use_tqdm=False)[0].outputs[0].text


def streamed(llm: LLM, seed: int) -> str:
    question = [{"role": "user", "content": f"How old is the number {seed}?"}]
    return "".join(delta.text for delta in llm.stream_chat(question, GREEDY))


CALLS: list[Callable[[LLM, int], Any]] = [generated, embedded, chatted, streamed]


def test_answers_are_those_of_calls_alone(llm: LLM) -> None:
    work = [(call, seed) for seed in range(3) for call in CALLS]
    alone = [call(llm, seed) for call, seed in work]
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(call, llm, seed) for call, seed in work]
        assert [call.result(PATIENCE_S) for call in running] == alone


def test_calls_share_steps(llm: LLM) -> None:
    """Each of two threads has begun before the other ends."""
    both = threading.Barrier(2, timeout=PATIENCE_S)

    def read() -> int:
        deltas = llm.stream_chat(QUESTION, LONG)
        next(deltas)
        both.wait()
        most = llm.stats.num_running
        num_deltas = sum(1 for _ in deltas)
        assert num_deltas > 0
        return most

    with ThreadPoolExecutor(2) as threads:
        assert [call.result(PATIENCE_S) for call in [threads.submit(read) for _ in "ab"]] == [2, 2]


def test_a_call_within_another(llm: LLM) -> None:
    alone = streamed(llm, 5)
    expected = generated(llm, 8)
    text = ""
    question = [{"role": "user", "content": "How old is the number 5?"}]
    for index, delta in enumerate(llm.stream_chat(question, GREEDY)):
        text += delta.text
        if index == 2:
            assert generated(llm, 8) == expected
    assert text == alone


def test_a_call_that_ends_early_leaves_the_others(llm: LLM) -> None:
    expected = generated(llm, 3)

    def give_up() -> None:
        deltas = llm.stream_chat(QUESTION, LONG)
        next(deltas)
        deltas.close()  # type: ignore[attr-defined]

    with ThreadPoolExecutor(3) as threads:
        quitting = [threads.submit(give_up) for _ in range(6)]
        assert threads.submit(generated, llm, 3).result(PATIENCE_S) == expected
        for call in quitting:
            call.result(PATIENCE_S)


def test_a_step_that_fails_ends_each_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=PATIENCE_S)
    step = llm._engine.step

    def read() -> None:
        deltas = llm.stream_chat(QUESTION, LONG)
        next(deltas)
        both.wait()
        if both.wait() == 0:
            monkeypatch.setattr(llm._engine, "step", fail)
        both.wait()
        for _ in deltas:
            pass

    def fail(_: Any = ()) -> None:
        raise EngineFaultError("it broke")

    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(read) for _ in "ab"]
        for call in calls:
            with pytest.raises(EngineFaultError, match="it broke"):
                call.result(PATIENCE_S)
    monkeypatch.setattr(llm._engine, "step", step)
    assert generated(llm, 1) == generated(llm, 1)


@pytest.mark.parametrize("part", ["submit", "collect"])
def test_ctrl_c_ends_one_call_and_harms_no_other(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    executor = llm._engine._executor
    alone, expected = streamed(llm, 6), generated(llm, 2)
    compute = getattr(executor, part)

    def interrupted(*args: Any) -> Any:
        monkeypatch.setattr(executor, part, compute)
        os.kill(os.getpid(), signal.SIGINT)
        return compute(*args)

    question = [{"role": "user", "content": "How old is the number 6?"}]
    deltas = llm.stream_chat(question, GREEDY)
    text = next(deltas).text
    monkeypatch.setattr(executor, part, interrupted)
    with pytest.raises(KeyboardInterrupt):
        generated(llm, 2)
    assert text + "".join(delta.text for delta in deltas) == alone
    assert generated(llm, 2) == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class BrokenEngine:
    """Its first step lasts until it is told to go on; what comes meanwhile cannot be applied."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.num_steps = 0

    def step(self, _: Any) -> list[RequestOutput]:
        self.num_steps += 1
        if self.num_steps > 1:
            raise EngineFaultError("it broke")
        self.has_begun.set()
        assert self.may_end.wait(PATIENCE_S)
        return []

    def apply(self, _: Any) -> list[RequestOutput]:
        raise RuntimeError("cannot be applied")


def test_a_call_waits_no_longer_than_the_step_though_its_end_fails() -> None:
    engine: Any = BrokenEngine()
    shared = SharedEngine(engine)
    stepping, waiting = (shared.submit([request(name)]) for name in "ab")
    threads = [threading.Thread(target=take, args=(shared, stepping), daemon=True)]
    threads[0].start()
    assert engine.has_begun.wait(PATIENCE_S)
    threads.append(threading.Thread(target=take, args=(shared, waiting), daemon=True))
    threads[1].start()
    while not shared._turn._waiters:  # type: ignore[attr-defined]
        time.sleep(0.001)
    shared.abort("a")
    engine.may_end.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def take(shared: SharedEngine, inbox: Inbox) -> None:
    with pytest.raises((EngineFaultError, RuntimeError), match=r"it broke|cannot be applied"):
        shared.take(inbox)


def request(request_id: str) -> AddRequest:
    return AddRequest(request_id=request_id, prompt_token_ids=token_array((1,)), params=GREEDY)
