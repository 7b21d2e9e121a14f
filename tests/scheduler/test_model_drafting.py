"""A draft model is asked where that pays, passes and all, and never makes a token late."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from legato.core.config import SchedulerConfig
from legato.core.plan import StepPlan
from legato.core.request import AbortRequest, AddRequest, Request
from legato.core.sampling_params import SamplingParams
from legato.core.step_record import DrafterName
from legato.core.token_ids import token_array
from legato.engine.loop.engine_loop import EngineLoop
from legato.executor.simulated import SimulatedExecutor, VirtualClock, simulated_token
from legato.kv.manager import KVCacheManager
from legato.scheduler.scheduler import Scheduler
from legato.scheduler.step_costs import StepCosts
from legato.speculation.drafter import Draft, Drafted
from tests.scheduler.step_times import steady_model, truth

COSTS = StepCosts(step_s=0.030, row_s=(5e-4, 1e-3, 1e-3, 1e-3, 1e-3), sample_s=5e-5)
MAX_LEN = 4096
VOCAB_SIZE = 1000


class FakeDraftModel:
    """Guesses what comes; every other guess is wrong where the chance says so.

    Args:
        pass_s: time of a pass with any number of rows.
        row_s: that each row takes beside it.
        chance: that it believes in, and has: guesses are right up to the first that is not.

    Attributes:
        asked: requests and depth of each draft.
        slices: seconds of each time that it caught up.
        spent_s: time of its passes together.
    """

    name: DrafterName = "model"

    def __init__(
        self, clock: VirtualClock, pass_s: float, row_s: float = 1e-4, chance: float = 0.95
    ) -> None:
        self._clock = clock
        self._pass_s, self._row_s, self._chance = pass_s, row_s, chance
        self._num_computed: dict[str, int] = {}
        self.asked: list[tuple[int, int]] = []
        self.slices: list[float] = []
        self.num_rests, self.spent_s = 0, 0.0
        self.slowdown = 1.0

    def advance(self, request: Request) -> None:
        pass

    def forget(self, request: Request) -> None:
        self._num_computed.pop(request.request_id, None)

    def skip_step(self) -> None:
        self.num_rests += 1

    def outlook(self, request: Request, most: int) -> Sequence[float]:  # noqa: ARG002
        return [self._chance] * most

    def num_missing(self, request: Request) -> int:
        return request.num_tokens - self._num_computed.get(request.request_id, 0)

    def pass_s(self, num_rows: int) -> float:
        return self._pass_s + self._row_s * num_rows if num_rows else 0.0

    def catch_up(self, requests: Sequence[Request], within_s: float) -> float:
        num_rows = int((within_s - self._pass_s) / self._row_s)
        num_left = num_rows
        for request in requests:
            count = max(0, min(num_left, self.num_missing(request) - 1))
            num_left -= count
            known = self._num_computed.get(request.request_id, 0)
            self._num_computed[request.request_id] = known + count
        begun_s = self._clock.now_s
        self._compute(max(0, num_rows - num_left))
        self.slices.append(self._clock.now_s - begun_s)
        return self.slices[-1]

    def draft(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        *,
        token_s: float,  # noqa: ARG002
        within_s: float,  # noqa: ARG002
    ) -> Drafted:
        begun_s = self._clock.now_s
        self.asked.append((len(requests), max(counts)))
        for step in range(max(counts)):
            self._compute(sum(step < count for count in counts))
        drafts = []
        for request, count in zip(requests, counts, strict=True):
            self._num_computed[request.request_id] = request.num_tokens
            name, end = request.request_id, request.num_tokens
            tokens = [simulated_token(name, end + i, VOCAB_SIZE) for i in range(count)]
            if self._chance < 0.5:
                tokens[0] += 1
            drafts.append(Draft(self.name, tokens, [self._chance] * count))
        return Drafted(drafts, self._clock.now_s - begun_s)

    def _compute(self, num_rows: int) -> None:
        taken_s = self.slowdown * self.pass_s(num_rows)
        self._clock.advance_to(self._clock.now_s + taken_s)
        self.spent_s += taken_s


class Server:
    """An engine with such a draft model and no other drafter.

    Attributes:
        tokens, times_s: of each request.
    """

    def __init__(
        self, pass_s: float, chance: float = 0.95, row_s: float = 1e-4, **settings: object
    ) -> None:
        config = SchedulerConfig(**settings).resolve(MAX_LEN)  # type: ignore[arg-type]
        kv = KVCacheManager(4000, 32)
        self.clock = VirtualClock()
        self.model = FakeDraftModel(self.clock, pass_s, row_s, chance)
        self.step_time = steady_model(COSTS, MAX_LEN)
        scheduler = Scheduler(
            config,
            max_model_len=MAX_LEN,
            kv=kv,
            step_time=self.step_time,
            draft_model=self.model,
        )
        executor = SimulatedExecutor(self.clock, truth(COSTS, lambda: 1.0), vocab_size=VOCAB_SIZE)
        self.engine = EngineLoop(scheduler, kv, executor, self.clock)
        self.plans: list[StepPlan] = []
        submit = executor.submit

        def noting(plan: StepPlan) -> None:
            self.plans.append(plan)
            submit(plan)

        executor.submit = noting  # type: ignore[method-assign]
        self.tokens: dict[str, list[int]] = {}
        self.times_s: dict[str, list[float]] = {}

    def add(self, name: str, prompt_len: int = 8, max_tokens: int = 100) -> None:
        request = AddRequest(
            request_id=name,
            prompt_token_ids=token_array(range(prompt_len)),
            params=SamplingParams(max_tokens=max_tokens, seed=0),
            arrival_time_s=self.clock.now_s,
        )
        self.step([request])

    def step(self, events: Sequence[AddRequest | AbortRequest] = ()) -> None:
        for output in self.engine.step(events):
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            times_s = self.times_s.setdefault(output.request_id, [])
            times_s += [self.clock.now_s] * len(output.new_token_ids)

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()


def expected(name: str, prompt_len: int = 8, max_tokens: int = 100) -> list[int]:
    return [simulated_token(name, prompt_len + i, VOCAB_SIZE) for i in range(max_tokens)]


def test_it_is_asked_where_it_brings_more_tokens_a_second() -> None:
    server = Server(pass_s=0.001)
    server.add("a")
    server.finish()
    assert server.tokens["a"] == expected("a")
    verified = [chunk for plan in server.plans for chunk in plan.chunks if chunk.kind == "verify"]
    assert {chunk.drafter for chunk in verified} == {"model"}
    assert len(server.plans) < 20
    drafting_s = sum(plan.drafting_s for plan in server.plans)
    assert drafting_s == pytest.approx(server.model.spent_s)
    without = Server(pass_s=0.001, speculative="off")
    without.add("a")
    without.finish()
    assert not without.model.asked
    assert server.clock.now_s < 0.5 * without.clock.now_s


@pytest.mark.parametrize(("pass_s", "chance"), [(0.035, 0.95), (0.001, 0.01)])
def test_it_is_not_asked_where_it_does_not(pass_s: float, chance: float) -> None:
    server = Server(pass_s, chance)
    server.add("a")
    server.finish()
    assert not server.model.asked
    assert server.model.num_rests > 90


def test_it_guesses_deeper_where_a_pass_is_cheap() -> None:
    depths = []
    for pass_s in (0.001, 0.01):
        server = Server(pass_s, chance=0.8)
        server.add("a")
        server.finish()
        depths.append(max(depth for _, depth in server.model.asked))
    assert depths[0] > 1.5 * depths[1] > 0


def test_streams_that_gain_are_asked_together() -> None:
    server = Server(pass_s=0.004)
    for i in range(6):
        server.add(f"{i}")
    server.finish()
    assert max(count for count, _ in server.model.asked) == 6
    for i in range(6):
        assert server.tokens[f"{i}"] == expected(f"{i}")


def test_a_number_is_taken_as_long_as_there_is_time() -> None:
    server = Server(pass_s=0.035, chance=0.6, speculative=3)
    server.add("a")
    server.finish()
    assert {depth for _, depth in server.model.asked[:-2]} == {3}


@pytest.mark.parametrize("speculative", ["auto", 8])
def test_no_token_is_late_for_a_guess(speculative: object) -> None:
    """Of passes of 4 ms beside a step of 31, two or three end in time, and no more."""
    server = Server(0.004, speculative=speculative, itl_slo_s=0.050)
    for i in range(3):
        server.add(f"{i}", 40)
    server.finish()
    assert server.model.asked
    for i in range(3):
        assert server.tokens[f"{i}"] == expected(f"{i}", 40)
        gaps = [b - a for a, b in pairwise(server.times_s[f"{i}"])]
        assert max(gaps) <= 0.0501
    limits = [plan.limit_s for plan in server.plans if plan.limit_s is not None]
    assert min(limits) < 0.047, "what drafting took is not the step's any more"


def test_what_drafting_takes_is_not_taken_for_slow_steps() -> None:
    server = Server(pass_s=0.002, itl_slo_s=0.100)
    margin = server.step_time.margin
    server.add("stream", max_tokens=3000)
    for i in range(60):
        server.add(f"{i}", 4, 1)
        for _ in range(3):
            server.step()
    mixed = [plan for plan in server.plans if len({chunk.kind for chunk in plan.chunks}) > 1]
    assert sum(chunk.kind == "verify" for plan in mixed for chunk in plan.chunks) > 20
    assert server.step_time.margin <= margin + 0.01


def test_a_prompt_is_caught_up_with_in_slices_where_that_is_repaid() -> None:
    server = Server(pass_s=0.001, row_s=1e-4)
    server.add("long", 1000, 300)
    server.finish()
    assert len(server.model.slices) >= 5
    assert max(server.model.slices) <= 0.5 * 0.032
    assert server.model.asked
    assert server.tokens["long"] == expected("long", 1000, 300)


def test_a_prompt_is_left_alone_where_it_would_not_be() -> None:
    server = Server(pass_s=0.001, row_s=1e-4)
    server.add("long", 2000, 6)
    server.finish()
    assert not server.model.slices


def test_catching_up_makes_nothing_late() -> None:
    server = Server(pass_s=0.001, itl_slo_s=0.040)
    server.add("long", 1000, 300)
    server.finish()
    assert server.model.slices
    gaps = [b - a for a, b in pairwise(server.times_s["long"])]
    assert max(gaps) <= 0.0401


def test_an_aborted_request_is_forgotten() -> None:
    server = Server(pass_s=0.001)
    server.add("a")
    server.add("b")
    server.step([AbortRequest(request_id="a")])
    server.finish()
    assert server.tokens["b"] == expected("b")
    assert not server.model._num_computed
