"""Supervision of a real process over the real socket, which only computes nothing."""

import asyncio
import resource
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from legato.core.config import EngineConfig, SchedulerConfig
from legato.core.errors import ConfigError
from legato.core.request import AbortRequest, AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.step_record import StepBegun
from legato.core.token_ids import token_array
from legato.engine.errors import EngineDeadError
from legato.engine.process import child_process, engine_process, pulse
from legato.engine.process import supervisor as supervisor_module
from legato.engine.process.engine_messages import EngineInfo, EngineStats, StepOutputs
from legato.engine.process.engine_process import EngineProcess
from legato.engine.process.supervisor import EngineSupervisor, Restarts
from legato.executor.simulated import VirtualClock
from tests.engine import fake_engine

TICK_S = 0.3
"""Time between two looks at an engine; a second outside of tests."""
CONFIG = EngineConfig(scheduler=SchedulerConfig(max_num_batched_tokens=100))

Script = Callable[[str], None]


class Listener:
    """Attributes: told: all that the supervisor reported."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def engine_is_ready(self, info: EngineInfo) -> None:
        assert info == fake_engine.INFO
        self.told.append("ready")

    def note_begun(self, step: StepBegun) -> None:
        self.told.append(f"begun {step.step_id}")

    def take_step(self, step: StepOutputs) -> None:
        [output] = step.outputs
        self.told.append(f"{output.request_id} {step.stats.num_running}")

    def engine_died(self, retry_after_s: float) -> None:
        assert retry_after_s >= 1
        self.told.append("died")

    def engine_is_given_up(self, reason: str) -> None:
        self.told.append(reason)

    async def heard(self, *told: str) -> None:
        """Wait until this was told, and nothing else before."""
        while len(self.told) < len(told):
            assert self.told == list(told[: len(self.told)])
            await asyncio.sleep(0.01)
        assert self.told == list(told)


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engine_process, pulse, supervisor_module):
        monkeypatch.setattr(module, "TICK_S", TICK_S)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Takes what each life of the engine is to be, in order."""
    path = tmp_path / "lives"
    program = (sys.executable, fake_engine.__file__, str(path))
    monkeypatch.setattr(engine_process, "_PROGRAM", program)

    def write(lives: str) -> None:
        path.write_text("\n".join(lives.split()))

    return write


@asynccontextmanager
async def supervised(timeout_s: float = 300.0) -> AsyncIterator[tuple[EngineSupervisor, Listener]]:
    """A supervisor that leaves nothing at the end."""
    listener = Listener()
    async with EngineProcess.starting(CONFIG) as engine:
        assert await engine.ready() == fake_engine.INFO
    supervisor = EngineSupervisor(CONFIG, engine, listener, timeout_s=timeout_s)
    try:
        yield supervisor, listener
    finally:
        await supervisor.close()
        assert engines() == []


def engines() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if fake_engine.__file__ in p.cmdline()]


def request(request_id: str) -> AddRequest:
    return AddRequest(
        request_id=request_id, prompt_token_ids=token_array([1]), params=SamplingParams()
    )


async def test_the_parts_of_a_start_are_reported_as_they_end(script: Script) -> None:
    script("serve")
    parts_s: dict[str, float] = {}
    async with EngineProcess.starting(CONFIG) as engine:
        assert await engine.ready(on_part=parts_s.__setitem__) == fake_engine.INFO
    assert parts_s == {"weights": 1.5}
    await engine.close()


async def test_an_engine_that_dies_is_followed_by_one_with_the_settings_of_then(
    script: Script,
) -> None:
    script("serve serve")
    async with supervised() as (supervisor, listener):
        supervisor.send(request("a"))
        await listener.heard("ready", "a 100")
        supervisor.check_running()
        supervisor.config = msgspec.structs.replace(
            CONFIG, scheduler=SchedulerConfig(max_num_batched_tokens=50)
        )
        supervisor.send(request("die"))
        await listener.heard("ready", "a 100", "died")
        with pytest.raises(EngineDeadError, match="restarted") as death:
            supervisor.check_running()
        assert death.value.retry_after_s is not None
        supervisor.send(request("to nobody"))
        await listener.heard("ready", "a 100", "died", "ready")
        supervisor.send(request("b"))
        await listener.heard("ready", "a 100", "died", "ready", "b 50")
        assert supervisor.num_restarts == 1
    assert listener.told[5:] == ["it was stopped"]
    with pytest.raises(EngineDeadError, match="it was stopped") as death:
        supervisor.check_running()
    assert death.value.retry_after_s is None


async def test_the_state_is_told_to_all_who_ask_unless_the_engine_dies(script: Script) -> None:
    script("serve serve")
    async with supervised() as (supervisor, listener):
        asked = [asyncio.create_task(supervisor.state()) for _ in range(2)]
        assert [state.num_blocks for state in await asyncio.gather(*asked)] == [100, 100]
        supervisor.send(request("die"))
        with pytest.raises(EngineDeadError):
            await supervisor.state()
        await listener.heard("ready", "died", "ready")
        assert (await supervisor.state()).num_blocks == 100


async def test_an_engine_may_die_while_it_loads_again(script: Script) -> None:
    script("serve die serve")
    async with supervised() as (supervisor, listener):
        supervisor.send(request("die"))
        await listener.heard("ready", "died", "ready")
        assert supervisor.num_restarts == 2


async def test_an_engine_that_always_dies_is_given_up(script: Script) -> None:
    script("serve die serve")
    async with supervised() as (supervisor, listener):
        supervisor.send(request("die"))
        await listener.heard("ready", "died", "ready")
        supervisor.send(request("die"))
        reason = "the engine process died 3 times in a row, each time within 60 s of serving"
        await listener.heard("ready", "died", "ready", reason)
        assert not supervisor.is_alive
        assert supervisor.death == reason
        with pytest.raises(EngineDeadError, match="3 times in a row"):
            supervisor.check_running()
    assert listener.told[-1] == reason, "stopping it changes nothing"


@contextmanager
def no_free_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_lack_of_descriptors_delays_the_next_engine(script: Script) -> None:
    script("serve serve")
    async with supervised() as (supervisor, listener):
        with no_free_descriptors():
            supervisor.send(request("die"))
            await listener.heard("ready", "died")
            await asyncio.sleep(0.5)
        await listener.heard("ready", "died", "ready")
        assert supervisor.num_restarts == 1


async def test_a_lack_of_descriptors_ends_no_watch(script: Script) -> None:
    script("serve serve")
    async with supervised(timeout_s=3 * TICK_S) as (supervisor, listener):
        await listener.heard("ready")
        with no_free_descriptors():
            await asyncio.sleep(2.5 * TICK_S)  # a look at the engine, at least
        supervisor.send(request("spin"))
        await listener.heard("ready", "died", "ready")


async def test_settings_that_are_refused_are_not_tried_again(script: Script) -> None:
    script("serve refuse")
    async with supervised() as (supervisor, listener):
        supervisor.send(request("die"))
        await listener.heard("ready", "died", "it cannot be served")


@pytest.mark.parametrize("name", ["hang", "spin"])
async def test_an_engine_that_does_not_answer_is_replaced_though_no_client_waits(
    script: Script, name: str
) -> None:
    """One that computes shows a sign of life, and an idle one answers."""
    script("serve serve")
    async with supervised(timeout_s=5 * TICK_S) as (supervisor, listener):
        supervisor.send(request("a"))
        await listener.heard("ready", "a 100")
        await asyncio.sleep(7 * TICK_S)  # longer than an engine may be silent
        assert listener.told == ["ready", "a 100"]
        supervisor.send(request(name))
        await listener.heard("ready", "a 100", "died", "ready")
        assert supervisor.num_stuck == 1


async def test_clients_that_come_and_leave_do_not_keep_a_spinning_engine(script: Script) -> None:
    script("serve serve")
    async with supervised(timeout_s=3 * TICK_S) as (supervisor, listener):
        supervisor.send(request("spin"))
        while "died" not in listener.told:
            supervisor.send(request("late"))
            supervisor.send(AbortRequest(request_id="late"))
            await asyncio.sleep(0.1)
        await listener.heard("ready", "died", "ready")


@pytest.mark.parametrize(
    ("name", "told"), [("slow", ["died", "ready"]), ("foreseen", ["foreseen 100"])]
)
async def test_a_step_may_take_ten_times_its_prediction(
    script: Script, name: str, told: list[str]
) -> None:
    script("serve serve")
    async with supervised(timeout_s=TICK_S) as (supervisor, listener):
        supervisor.send(request(name))
        await listener.heard("ready", *told)


async def test_an_engine_that_computes_without_end_while_it_loads_again_is_replaced(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first start took a moment."""
    monkeypatch.setattr(engine_process, "_MAX_SILENT_LOADING", 2)
    script("serve spin serve")
    async with supervised() as (supervisor, listener):
        supervisor.send(request("die"))
        await listener.heard("ready", "died", "ready")
        assert supervisor.num_restarts == 2


class Busy:
    """An engine in a long step, in whose queue two requests wait; others wait to be sent."""

    loading_s = 0.0
    pid = psutil.Process().pid
    info = fake_engine.INFO

    def __init__(self) -> None:
        self.num_pending = 1

    def send(self, message: object) -> bool:
        is_abort = isinstance(message, AbortRequest)
        self.num_pending += -1 if is_abort else isinstance(message, AddRequest)
        return not is_abort

    async def steps(self) -> AsyncIterator[StepOutputs]:
        yield StepOutputs([], EngineStats(num_running=1, num_waiting=2))
        await asyncio.Future()

    def abandon(self) -> None:
        pass

    async def close(self) -> str:
        return ""


async def test_a_request_that_is_aborted_before_it_was_sent_waits_no_longer() -> None:
    """The engine, in a long step, says nothing of it. Those in its queue wait on."""
    counts: list[tuple[int, int]] = []

    class Counting(Listener):
        def take_step(self, step: StepOutputs) -> None:
            counts.append((step.stats.num_running, step.stats.num_waiting))
            assert step.records == []

    engine: Any = Busy()
    supervisor = EngineSupervisor(CONFIG, engine, Counting(), timeout_s=300.0)
    while not counts:
        await asyncio.sleep(0.001)
    for name in "bc":  # they came since the step that was told
        supervisor.send(request(name))
    for name in "abc":
        supervisor.send(AbortRequest(request_id=name))
    await supervisor.close()
    assert counts == [(1, 3), (1, 4), (1, 3), (1, 2)]


@pytest.mark.parametrize("lives", ["die", "refuse"])
async def test_nothing_is_left_of_a_start_that_failed(script: Script, lives: str) -> None:
    script(lives)
    with pytest.raises((ConfigError, EngineDeadError)):
        async with EngineProcess.starting(CONFIG) as engine:
            await engine.ready()
    assert engines() == []


async def test_it_can_be_closed_before_it_has_begun_and_while_it_starts_again(
    script: Script,
) -> None:
    script("serve serve serve")
    async with supervised():
        pass
    async with supervised() as (supervisor, listener):
        supervisor.send(request("die"))
        await listener.heard("ready", "died")


class Unreapable:
    """A process that no signal reaches and whose end is not seen until it is released.

    As if it were stuck in the kernel.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.released = threading.Event()
        self.is_reaped = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def kill(self) -> None:
        if self.released.is_set():
            self._process.kill()

    def release(self) -> None:
        self.released.set()
        self.kill()

    def wait(self, _timeout: float | None = None) -> int:
        assert self.released.wait(60), "nothing ended this wait"
        status = self._process.wait()
        self.is_reaped.set()
        return status


@pytest.fixture
def unreapable(monkeypatch: pytest.MonkeyPatch) -> list[Unreapable]:
    """Processes, as they are started."""
    started: list[Unreapable] = []

    def start(command: Sequence[str], **options: Any) -> Unreapable:
        started.append(Unreapable(popen(command, **options)))
        return started[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(child_process.subprocess, "Popen", start)
    monkeypatch.setattr(engine_process, "_STOP_TIMEOUT_S", 0.05)
    monkeypatch.setattr(engine_process, "_KILL_TIMEOUT_S", 0.05)
    return started


async def test_an_engine_that_cannot_be_reaped_is_left_behind(
    script: Script, unreapable: list[Unreapable]
) -> None:
    """And reaped when it ends after all."""
    script("serve serve")
    listener = Listener()
    async with EngineProcess.starting(CONFIG) as engine:
        await engine.ready()
    supervisor = EngineSupervisor(CONFIG, engine, listener, timeout_s=3 * TICK_S)
    supervisor.send(request("hang"))
    await listener.heard("ready", "died", "ready")
    await supervisor.close()
    for process in unreapable:
        assert not process.released.is_set()
        process.release()
        assert await asyncio.to_thread(process.is_reaped.wait, 60)
    assert len(unreapable) == 2


async def test_a_start_that_fails_does_not_wait_for_what_cannot_be_reaped(
    script: Script, unreapable: list[Unreapable]
) -> None:
    script("refuse")
    with pytest.raises(ConfigError):
        async with EngineProcess.starting(CONFIG) as engine:
            await engine.ready()
    [process] = unreapable
    process.release()
    assert await asyncio.to_thread(process.is_reaped.wait, 60)


async def test_an_engine_that_reads_nothing_can_be_abandoned(
    script: Script, unreapable: list[Unreapable]
) -> None:
    """Unread messages to it delay no other process."""
    script("serve")
    async with EngineProcess.starting(CONFIG) as engine:
        await engine.ready()
    engine.send(request("hang"))
    for _ in range(100):
        engine.send(request("x" * 2**16))
    engine.abandon()
    assert [step async for step in engine.steps()] == []
    unreapable[0].release()
    assert await engine.close() == "SIGKILL"


def test_three_short_lives_in_a_row_are_enough() -> None:
    clock = VirtualClock()
    restarts = Restarts(loading_s=5.0, clock=clock)
    for served_s in (3600.0, 59.0, 1.0, 61.0, 0.0, 59.0):
        clock.advance_to(clock() + served_s)
        restarts.note_death()
        clock.advance_to(clock() + 1000.0)  # loading is not life
        restarts.note_ready()
    with pytest.raises(EngineDeadError, match="3 times in a row"):
        restarts.note_death()
    assert restarts.count == 6


def test_engines_that_die_while_loading_have_not_lived() -> None:
    clock = VirtualClock()
    restarts = Restarts(loading_s=5.0, clock=clock)
    clock.advance_to(100.0)
    restarts.note_death()
    for _ in range(2):
        clock.advance_to(clock() + 100.0)
        restarts.note_death()
    with pytest.raises(EngineDeadError):
        restarts.note_death()


def test_clients_are_told_to_come_back_when_the_next_one_should_serve() -> None:
    clock = VirtualClock()
    restarts = Restarts(loading_s=5.0, clock=clock)
    clock.advance_to(100.0)
    restarts.note_death()
    assert restarts.seconds_left == 5.0
    clock.advance_to(103.0)
    assert restarts.seconds_left == 2.0
    clock.advance_to(110.0)
    assert restarts.seconds_left == 1.0
