"""Streams beside which long prompts come, on the virtual clock: what `legato bench --probe` asks.

The machine is interrupted as two shared cores of an EPYC were seen to be: a few steps in a hundred
take 20 to 45 ms longer, and several come together (docs/contributing/experiments.md).
"""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from legato.core.config import SchedulerConfig
from legato.core.outputs import RequestOutput
from legato.core.request import AbortRequest, AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.engine.loop.engine_loop import EngineLoop
from legato.executor.simulated import SimulatedExecutor, VirtualClock
from legato.kv.manager import KVCacheManager
from legato.scheduler.scheduler import Scheduler
from legato.scheduler.step_costs import StepCosts
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel
from tests.scheduler.step_times import calibrate

EPYC = StepCosts(
    step_s=0.015,
    row_s=(1e-4, 2e-4, 3e-4, 3e-4, 3e-4),
    decode_row_s=3e-4,
    decode_context_s=2e-6,
    chunk_s=2e-3,
    area_s=7e-8,
    context_s=1.5e-6,
    sample_s=5e-5,
)
"""About what steps of SmolLM2-135M take there: 12 decodes 19 ms, 512 tokens 115 to 250 ms."""

_MAX_MODEL_LEN = 8192
_STEADY_S = 2.0


class Shape(NamedTuple):
    """Streams that run, long prompts that come at once, their length, and what is promised."""

    num_streams: int
    num_longs: int
    long_prompt: int
    itl_slo_s: float


SHAPES = (
    Shape(12, 3, 3000, 0.12),
    Shape(8, 1, 7000, 0.12),
    Shape(32, 3, 4000, 0.2),
)


class Outcome(NamedTuple):
    """Of the gaps as delivered while the prompts were computed, and of the last's first token.

    Attributes:
        num_steps, num_late: how many, and how many of these broke the promise.
    """

    p50_s: float
    p99_s: float
    max_s: float
    ttft_s: float
    num_steps: int
    num_late: int


class Interruptions:
    """How long steps take that other programs interrupt.

    Args:
        rate: interruptions per second of steps; it may be changed.
        lasting: chance that the step after an interrupted one is interrupted, too.
        longest: of an interruption, in seconds.
    """

    def __init__(
        self, seed: int, *, rate: float, lasting: float = 0.4, longest: float = 0.045
    ) -> None:
        self._random = random.Random(seed)
        self._lasting = lasting
        self._longest = longest
        self._is_interrupted = False
        self.rate = rate

    def __call__(self, seconds: float) -> float:
        """Return how long a step takes that takes so many seconds undisturbed."""
        rng = self._random
        begins = self.rate * (1.0 - self._lasting) * seconds
        chance = self._lasting if self._is_interrupted and self.rate else begins
        self._is_interrupted = rng.random() < chance
        seconds *= max(0.8, rng.gauss(1.0, 0.015 if rng.random() < 0.6 else 0.05))
        return seconds + self._is_interrupted * rng.uniform(0.02, self._longest)


class ProbedServer:
    """One engine, warm after its first probe, and the front end that hands its tokens on.

    Args:
        noise: how long a step takes, from its seconds undisturbed; the calibration has it, too.
        settings: further fields of `SchedulerConfig`.
    """

    def __init__(
        self,
        shape: Shape,
        noise: Callable[[float], float],
        *,
        seed: int = 0,
        costs: StepCosts = EPYC,
        **settings: object,
    ) -> None:
        self.shape = shape
        prior = [(shape, noise(s)) for shape, s in calibrate(costs, _MAX_MODEL_LEN) if s < 0.5]
        self.step_time = StepTimeModel(prior)
        config = SchedulerConfig(itl_slo_s=shape.itl_slo_s, **settings).resolve(_MAX_MODEL_LEN)
        kv = KVCacheManager(4000, 32, enable_prefix_caching=False)
        scheduler = Scheduler(config, max_model_len=_MAX_MODEL_LEN, kv=kv, step_time=self.step_time)
        self.clock = VirtualClock()
        executor = SimulatedExecutor(
            self.clock, lambda plan: noise(costs.seconds(StepShape.of(plan)))
        )
        self.engine = EngineLoop(scheduler, kv, executor, self.clock)
        self._random = random.Random(seed)
        self._way_s = 0.0
        self._written_s: dict[str, list[float]] = {}
        self._num_probes = 0

    def probe(self) -> Outcome:
        """Let streams run for a while, then long prompts come; all of it ends with them."""
        streams = [self._name("stream", i) for i in range(self.shape.num_streams)]
        longs = [self._name("long", i) for i in range(self.shape.num_longs)]
        self._num_probes += 1
        self._step([self._request(name, 64, 1000) for name in streams])
        while not all(self._written_s.get(name) for name in streams):
            self._step([])
        begun_s = self.clock()
        while self.clock() < begun_s + _STEADY_S:
            self._step([])
        sent_s = self.clock()
        self._step([self._request(name, self.shape.long_prompt, 2) for name in longs])
        while not all(self._written_s.get(name) for name in longs):
            self._step([])
        first_s = max(self._written_s[name][0] for name in longs)
        aborts = [AbortRequest(request_id=name) for name in streams]
        self._step(aborts)
        while self.engine.has_work:
            self._step([])
        gaps_s = [
            until_s - since_s
            for name in streams
            for since_s, until_s in pairwise(self._written_s[name])
            if sent_s < until_s <= first_s
        ]
        self._written_s.clear()
        p50_s, p99_s = np.percentile(gaps_s, [50, 99])
        num_steps = len(gaps_s) // len(streams)
        num_late = sum(gap_s > self.shape.itl_slo_s for gap_s in gaps_s) // len(streams)
        ttft_s = first_s - sent_s
        return Outcome(float(p50_s), float(p99_s), max(gaps_s), ttft_s, num_steps, num_late)

    def _step(self, events: list[AddRequest | AbortRequest]) -> None:
        self.clock.advance_to(self.clock() + self._random.uniform(0.0003, 0.001))
        outputs = self.engine.step(events)
        self._hand_on(outputs)

    def _hand_on(self, outputs: list[RequestOutput]) -> None:
        way_s = self._random.lognormvariate(-6.4, 0.4)  # 1 to 3 ms
        for output in outputs:
            if output.new_token_ids:
                self._written_s.setdefault(output.request_id, []).append(self.clock() + way_s)
        delay_change_s, self._way_s = way_s - self._way_s, way_s
        self.engine.record_delivery(delay_change_s)

    def _name(self, kind: str, index: int) -> str:
        return f"{kind}-{self._num_probes}-{index}"

    def _request(self, name: str, prompt_len: int, max_tokens: int) -> AddRequest:
        return AddRequest(
            request_id=name,
            prompt_token_ids=token_array([0]) * prompt_len,
            params=SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens),
            arrival_time_s=self.clock(),
        )
