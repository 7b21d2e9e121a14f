"""Drafts behind tokens that are in flight: planned right, verified right, and where they pay."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.config import SchedulerConfig
from legato.core.outputs import FinishReason, RequestOutput
from legato.core.plan import StepPlan
from legato.core.request import AbortRequest, AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.engine.loop.engine_loop import EngineLoop
from legato.executor.simulated import SimulatedExecutor, VirtualClock, simulated_token
from legato.kv.manager import KVCacheManager
from legato.scheduler.scheduler import Scheduler
from legato.scheduler.step_costs import StepCosts
from tests.engine.tokens import tokens_of
from tests.profiles import examples
from tests.scheduler.foretold import Foretold
from tests.scheduler.step_times import steady_model, truth

MAX_LEN = 64
VOCAB_SIZE = 1000
NUM_DRAFTS = 3
FREE = StepCosts(step_s=0.01, row_s=(0.0,) * 5)
"""Where drafts cost nothing."""


def token_at(name: str, position: int) -> int:
    return simulated_token(name, position, VOCAB_SIZE)


class Executor(SimulatedExecutor):
    """Attributes: `plans`: that were submitted, each with how many were in flight before it."""

    def __init__(self, clock: VirtualClock, costs: StepCosts, depth: int) -> None:
        super().__init__(clock, truth(costs, lambda: 1.0), vocab_size=VOCAB_SIZE, depth=depth)
        self.plans: list[tuple[StepPlan, int]] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append((plan, len(self._submitted)))
        super().submit(plan)


class Engine(EngineLoop):
    """On a simulated device.

    Args:
        host_s: seconds that pass at each look at the clock.
    """

    def __init__(
        self,
        drafter: Foretold,
        *,
        depth: int = 2,
        num_blocks: int = 64,
        costs: StepCosts = FREE,
        host_s: float = 0.0,
        **settings: Any,
    ) -> None:
        config = SchedulerConfig(**{"speculative": NUM_DRAFTS, **settings}).resolve(MAX_LEN)
        clock = VirtualClock()
        self.kv = KVCacheManager(num_blocks, 4)
        self.scheduler = Scheduler(
            config,
            max_model_len=MAX_LEN,
            kv=self.kv,
            step_time=steady_model(costs, MAX_LEN) if config.speculative == "auto" else None,
            drafters=(drafter,),
        )
        self.executor = Executor(clock, costs, depth)
        super().__init__(self.scheduler, self.kv, self.executor, ticking(clock, host_s))
        self.outputs: list[RequestOutput] = []

    @property
    def plans(self) -> list[tuple[StepPlan, int]]:
        return self.executor.plans

    def run(self, *requests: AddRequest) -> dict[str, list[int]]:
        """Until nothing is left to do; all tokens so far, by request id."""
        self.outputs += self.step(requests)
        while self.has_work:
            self.outputs += self.step()
        return tokens_of(self.outputs)


def ticking(clock: VirtualClock, host_s: float) -> Callable[[], float]:
    def look() -> float:
        clock.advance_to(clock.now_s + host_s)
        return clock.now_s

    return look


def ask(name: str, num_prompt_tokens: int = 5, **params: Any) -> AddRequest:
    eos_token_ids = params.pop("eos_token_ids", ())
    return AddRequest(
        request_id=name,
        prompt_token_ids=token_array(range(num_prompt_tokens)),
        params=SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "seed": 0, **params}),
        eos_token_ids=eos_token_ids,
    )


def expected(request: AddRequest) -> list[int]:
    """The tokens of a simulated request, the same under any plan."""
    first, tokens = len(request.prompt_token_ids), list[int]()
    for position in range(first, first + (request.params.max_tokens or 0)):
        tokens.append(token_at(request.request_id, position))
        if tokens[-1] in request.eos_token_ids:
            break
    return tokens


@pytest.mark.parametrize(("first_is_right", "num_accepted"), [(True, NUM_DRAFTS), (False, 0)])
def test_the_first_guess_is_of_the_token_in_flight(first_is_right: bool, num_accepted: int) -> None:
    """Where it is wrong, so are the drafts: in truth others come."""

    def guessed(name: str, position: int) -> int:
        wrong = VOCAB_SIZE * (position >= 6 and not first_is_right)
        return token_at(name, position) + wrong

    engine = Engine(Foretold(guessed))
    request = ask("it")
    engine.set_recording(is_on=True)
    assert engine.run(request) == {"it": expected(request)}
    (prompt, _), (decode, ahead), (drafted, behind), (next_one, alone), *_ = engine.plans
    assert [chunk.kind for chunk in (*prompt.chunks, *decode.chunks)] == ["prefill", "decode"]
    assert (ahead, behind) == (1, 1), "planned before the token of the step before was known"
    [chunk] = drafted.chunks
    # The prompt has five tokens and the first of the output is known; that at 6 is in flight.
    assert (chunk.start, chunk.num_tokens, chunk.num_samples) == (6, 4, 4)
    assert chunk.draft_token_ids == tuple(guessed("it", position) for position in (7, 8, 9))
    assert chunk.drafter == "own"
    assert alone == 0, "it was planned when the drafts had landed"
    assert next_one.chunks[0].start == 7 + num_accepted
    [record] = [r.chunks[0] for r in engine.take_records() if getattr(r, "step_id", None) == 2]
    assert record.num_accepted == num_accepted


def test_nobody_drafts_before_its_first_token_is_known() -> None:
    """Drafters get a stream with this."""
    engine = Engine(Foretold(token_at))
    engine.run(ask("it", max_tokens=3))
    assert [plan.chunks[0].kind for plan, _ in engine.plans[:2]] == ["prefill", "decode"]


def test_drafts_are_worth_less_where_what_is_before_them_is_a_guess() -> None:
    """A third of a step is worth a chance of a half, and not one of a quarter."""
    costs = StepCosts(step_s=0.01, row_s=(0.005,) * 5)
    drafted: list[int] = []
    for depth in (1, 2):
        drafter = Foretold(token_at, chance=0.5)
        engine = Engine(drafter, depth=depth, speculative="auto", costs=costs)
        engine.run(ask("it"))
        chunks = [chunk for plan, _ in engine.plans for chunk in plan.chunks]
        drafted.append(max(len(chunk.draft_token_ids) for chunk in chunks))
    assert drafted == [1, 0]


@pytest.mark.parametrize(
    ("turnaround_s", "params", "is_drafted"),
    [(0.0, {}, True), (0.02, {}, False), (0.02, {"presence_penalty": 1.0}, True)],
    ids=["no time", "much time", "waits anyway"],
)
def test_drafts_are_not_worth_a_wait_that_is_longer_than_they_save(
    turnaround_s: float, params: dict[str, float], is_drafted: bool
) -> None:
    drafter = Foretold(token_at, chance=0.5)
    engine = Engine(drafter, speculative="auto")
    for _ in range(100):
        engine.scheduler.record_turnaround(turnaround_s)
    engine.run(ask("it", **params))
    kinds = {chunk.kind for plan, _ in engine.plans for chunk in plan.chunks}
    assert ("verify" in kinds) is is_drafted


@pytest.mark.parametrize(("depth", "is_known"), [(1, False), (2, True)])
def test_a_wait_is_what_the_host_does_beside_a_device_that_computes(
    depth: int, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where steps are planned one by one, none is lost by drafts."""
    engine = Engine(Foretold(token_at), depth=depth, speculative="off", host_s=0.001)
    noted: list[float] = []
    monkeypatch.setattr(engine.scheduler, "record_turnaround", noted.append)
    engine.run(ask("it"))
    engine.step()
    engine.executor._clock.advance_to(1000.0)  # with nothing to do
    engine.run(ask("other"))
    assert bool(noted) is is_known
    # Its end, events, planning and submission each look at the clock.
    assert all(0.001 < seconds < 0.01 for seconds in noted)


@given(data=st.data())
@examples(60)
def test_tokens_are_the_same_and_nothing_is_planned_behind_drafts(data: st.DataObject) -> None:
    depth = data.draw(st.integers(1, 3), "depth")
    wrong = data.draw(st.sets(st.integers(0, 30), max_size=12), "wrong")
    engine = Engine(
        Foretold(token_at, lambda _, position: position not in wrong),
        depth=depth,
        num_blocks=data.draw(st.integers(16, 30), "blocks"),
        speculative=data.draw(st.sampled_from([1, NUM_DRAFTS, 40]), "K"),
        max_num_batched_tokens=data.draw(st.integers(6, 40), "budget"),
        max_num_seqs=4,
        admission_optimism=1.0,
    )
    asked: list[AddRequest] = []
    for i in range(data.draw(st.integers(1, 6), "requests")):
        length = data.draw(st.integers(1, 20), "prompt")
        end = token_at(f"{i}", data.draw(st.integers(length, length + 20), "end"))
        penalty = data.draw(st.sampled_from([0.0, 0.0, 1.0]), "penalty")
        asked.append(
            ask(f"{i}", length, max_tokens=15, eos_token_ids=(end,), presence_penalty=penalty)
        )
    aborted = data.draw(st.sets(st.sampled_from([r.request_id for r in asked])), "aborted")
    engine.outputs += engine.step(asked[:4])
    for _ in range(data.draw(st.integers(0, 6), "steps")):
        engine.outputs += engine.step()
    engine.outputs += engine.step([AbortRequest(request_id=name) for name in sorted(aborted)])
    tokens = engine.run(*asked[4:])
    ends = {o.request_id: o.finish_reason for o in engine.outputs if o.finish_reason is not None}
    assert ends.keys() == {request.request_id for request in asked}
    for request in asked:
        found = tokens.get(request.request_id, [])
        if ends[request.request_id] is FinishReason.ABORT:
            assert found == expected(request)[: len(found)]
        else:
            assert found == expected(request)
    assert engine.stats.kv_usage == 0.0
    check_plans(engine, {request.request_id: request for request in asked})


def check_plans(engine: Engine, asked: dict[str, AddRequest]) -> None:
    for i, (plan, num_in_flight) in enumerate(engine.plans):
        before = [plan for plan, _ in engine.plans[i - num_in_flight : i]]
        for chunk in (chunk for one in before for chunk in one.chunks):
            assert not chunk.draft_token_ids, "planned behind drafts"
        for chunk in plan.chunks:
            request = asked[chunk.request_id]
            assert chunk.end < len(request.prompt_token_ids) + 15, "behind its length"
            is_ahead = any(c.request_id == chunk.request_id for one in before for c in one.chunks)
            assert not (is_ahead and chunk.kind == "verify" and request.params.needs_values)
