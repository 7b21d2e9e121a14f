"""An engine whose every call to another file can be made to raise, without a list of the calls."""

import sys
from collections import Counter
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import legato
from legato.core import containment
from legato.core.config import SchedulerConfig
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.plan import StepPlan
from legato.core.request import AbortRequest, AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.slo import ServiceParams
from legato.core.structured_outputs import StructuredOutputs
from legato.core.token_ids import token_array
from legato.core.vocabulary import Vocabulary
from legato.engine.calibration import recalibration
from legato.engine.calibration.calibration import Calibration
from legato.engine.calibration.recalibration import Recalibration
from legato.engine.loop import engine_loop, intake, recovery
from legato.engine.loop.engine_loop import EngineLoop
from legato.engine.loop.grammars import Grammars
from legato.executor import simulated
from legato.executor.simulated import SimulatedExecutor, VirtualClock, simulated_token
from legato.kv.manager import BorrowedBlocks, KVCacheManager
from legato.kv.state_slots import StateSlots
from legato.scheduler import replanning, scheduler
from legato.scheduler.scheduler import Scheduler
from tests.engine.test_engine_loop import coming
from tests.scheduler.drafters import RandomDrafter

_ROOT = str(Path(legato.__file__).parent)
_LOOP = [str(path) for path in Path(engine_loop.__file__).parent.glob("*.py")]
CALLERS = {scheduler.__file__, recalibration.__file__, *_LOOP}
"""Files whose calls to other files are made to raise: the engine's loop and its scheduler."""

_NEVER_RAISING = {
    module.__file__ for module in (containment, intake, recovery, replanning, simulated)
}
"""Files whose functions contain what their own calls raise; and the clock."""

BLOCK_SIZE = 4
_MOST_STEPS = 400
_VOCABULARY = Vocabulary.of((bytes([i]) for i in range(256)), frozenset())


class InjectedError(RuntimeError):
    """A call raised because the test wants it."""


class Call(NamedTuple):
    """A call from one function to another, by their names."""

    caller: str
    callee: str


class Calls:
    """Counts the calls of `CALLERS` to other files; raises at one of them.

    Use it as `sys.setprofile`'s function: what that raises comes out of the call.

    Args:
        at: the call that raises, and how many like it come before; None to raise nowhere.

    Attributes:
        counts: key a call.
    """

    def __init__(self, at: tuple[Call, int] | None = None) -> None:
        self.counts: Counter[Call] = Counter()
        self.has_raised = False
        self._at = at
        self._begun: set[FrameType] = set()  # of generators
        self._names: dict[tuple[CodeType, CodeType], Call | None] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_back is None:
            return
        key = frame.f_back.f_code, frame.f_code
        if key not in self._names:
            self._names[key] = _call(*key)
        call = self._names[key]
        if call is None:
            return
        if frame.f_code.co_flags & CO_GENERATOR:
            if frame in self._begun:
                return  # it goes on, or is closed by the garbage collector
            self._begun.add(frame)
        if (call, self.counts[call]) == self._at:
            self.has_raised = True
            raise InjectedError(" -> ".join(call))
        self.counts[call] += 1


def _call(caller: CodeType, callee: CodeType) -> Call | None:
    is_inner = callee.co_filename.startswith(_ROOT) or callee.co_filename == __file__
    if caller.co_filename not in CALLERS or not is_inner:
        return None
    if callee.co_filename in {caller.co_filename, *_NEVER_RAISING}:
        return None
    return Call(_name(caller), _name(callee))


def _name(code: CodeType) -> str:
    return f"{Path(code.co_filename).stem}.{code.co_qualname}"


class StrictExecutor(SimulatedExecutor):
    """Computes only requests that were introduced to it, the ids in `known`."""

    def __init__(self, clock: VirtualClock, depth: int) -> None:
        super().__init__(clock, lambda _: 0.01, depth=depth)
        self.known: set[str] = set()

    def submit(self, plan: StepPlan) -> None:
        self.known.difference_update(plan.ended_requests)
        self.known.update(request.request_id for request in plan.new_requests)
        assert self.known.issuperset(chunk.request_id for chunk in plan.chunks)
        super().submit(plan)


class Server:
    """An engine of all parts but transfers, and what comes out of it.

    Args:
        has_states: whether its model has recurrent layers.

    Attributes:
        tokens, reasons: key request id.
    """

    def __init__(self, depth: int, *, has_states: bool) -> None:
        self.clock = VirtualClock()
        self.states: StateSlots | None = None
        if has_states:
            self.states = StateSlots(6, depth, block_size=4, num_spare_slots=12, unit=4, spacing=8)
        self.executor = StrictExecutor(self.clock, depth)
        num_host_slots = 0 if has_states else 12
        self.kv = KVCacheManager(23, BLOCK_SIZE, num_host_slots=num_host_slots, states=self.states)
        self.drafter = RandomDrafter(coming, vocab_size=32_000)
        self.config = SchedulerConfig(
            max_num_batched_tokens=24, max_num_seqs=6, speculative=3, ttft_slo_s=2.0, itl_slo_s=0.1,
            prefill_order="lpm", admission_optimism=1.0,
        )  # fmt: skip
        self.scheduler = Scheduler(
            self.config.resolve(100), max_model_len=100, kv=self.kv, drafters=[self.drafter]
        )
        grammars = Grammars()
        grammars.set_vocabulary(_VOCABULARY)
        self.engine = EngineLoop(
            self.scheduler,
            self.kv,
            self.executor,
            self.clock,
            grammars=grammars,
            recalibration=Recalibration(self.kv, self._calibrate, lambda _: None, self.clock),
        )
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, list[FinishReason]] = {}
        self.prompts: dict[str, int] = {}

    def add(self, name: str, prompt_len: int, max_tokens: int = 5, **more: Any) -> AddRequest:
        self.tokens[name], self.reasons[name], self.prompts[name] = [], [], prompt_len
        first = more.get("first", 100 * len(self.prompts))
        form = StructuredOutputs(grammar="start: /a+/") if more.get("is_formed") else None
        return AddRequest(
            request_id=name,
            prompt_token_ids=token_array(range(first, first + prompt_len)),
            params=SamplingParams(max_tokens=max_tokens, seed=0, structured_outputs=form),
            service=ServiceParams(tenant=more.get("tenant", "")),
            arrival_time_s=self.clock(),
        )

    def expected(self, name: str) -> list[int]:
        count = len(self.tokens[name])
        return [simulated_token(name, self.prompts[name] + i, 32_000) for i in range(count)]

    def step(self, *events: AddRequest | AbortRequest) -> None:
        self._note(self.engine.apply(events))
        self._note(self.engine.step())
        self.engine.take_records()
        self.engine.take_kv_events()
        assert self.engine.stats.num_running >= 0

    def drain(self) -> None:
        for _ in range(_MOST_STEPS):
            if not self.engine.has_work:
                if self.engine.idle_s != 0.0:
                    return
                self.engine.use_idle_time()
                continue
            self.step()
        raise AssertionError("the engine does not come to an end")

    def run(self) -> None:
        """Serve some requests that use all parts."""
        engine = self.engine
        engine.set_recording(is_on=True)
        engine.announce_steps(lambda _: None)
        engine.watch_cache()
        self.step(self.add("a", 30, 25), self.add("b", 30, 25, tenant="other", first=100))
        self.step(self.add("formed", 9, is_formed=True))
        self.step(self.add("aborted early", 9), AbortRequest(request_id="aborted early"))
        self.step(self.add("aborted late", 9, max_tokens=40), self.add("c", 21, max_tokens=18))
        self.step(self.add("d", 17, max_tokens=18), self.add("e", 9, max_tokens=14))
        for _ in range(4):
            self.step()
        self.step(AbortRequest(request_id="aborted late"))
        engine.record_delivery(0.001)
        state = engine.state
        assert state is None or state.num_blocks
        engine.reconfigure(SchedulerConfig(max_num_batched_tokens=16, speculative=2).resolve(100))
        self.drain()
        engine.forget_cache()
        self.step()
        self.clock.advance_to(self.clock() + 6.0)
        for _ in range(4):
            engine.use_idle_time()
        self.step(self.add("f", 30))
        self.drain()

    def run_after(self) -> None:
        """Serve one more request, whose plan also ends the last ones in the executor."""
        self.step(self.add("after", 30))
        self.drain()
        self.engine.close()

    def _note(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert not self.reasons[output.request_id], "an output after the end"
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.reasons[output.request_id].append(output.finish_reason)

    def _calibrate(self, borrowed: BorrowedBlocks) -> Calibration:
        return Calibration(
            self.executor, block_ids=borrowed.block_ids, block_size=BLOCK_SIZE,
            max_model_len=100, max_num_seqs=2, vocab_size=100, clock=self.clock,
        )  # fmt: skip


def walk(
    depth: int, *, has_states: bool, at: tuple[Call, int] | None = None
) -> tuple[Server, Calls]:
    """Run a server; one call raises, if `at` names it."""
    server, calls = Server(depth, has_states=has_states), Calls(at)
    sys.setprofile(calls)
    try:
        server.run()
    finally:
        sys.setprofile(None)
    server.run_after()
    return server, calls
