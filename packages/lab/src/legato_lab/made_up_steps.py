"""Runs steps of made-up requests on an executor alone, without a scheduler."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from legato.core.plan import ScheduledChunk, StepPlan
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.step_record import ChunkKind
from legato.core.token_ids import token_array
from legato.engine.assembly.runtime import ModelRuntime
from legato.engine.calibration.calibration import window_tables
from legato.executor.base import Executor

_GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=10_000)
_FIRST_TOKEN, _NUM_TOKENS = 100, 10_000


class TimedStep(NamedTuple):
    """Attributes:
    interval_s: since the end of the step before, or since this step was submitted.
    seconds: by the executor's own clock.
    """

    interval_s: float
    seconds: float


class _MadeUp(NamedTuple):
    request: AddRequest
    blocks: tuple[int, ...]
    window_blocks: tuple[tuple[int, ...], ...]


class MadeUpSteps:
    """Runs steps; requests are added with their first step, and removed with the first after `end`.

    Attributes:
        num_cache_tokens: tokens that the cache holds.
    """

    def __init__(self, runtime: ModelRuntime) -> None:
        self._executor: Executor = runtime.executor
        self._block_size = runtime.kv.block_size
        self._vocab_size = runtime.spec.vocab_size
        self._window_blocks = [range(count) for count in runtime.kv.group_sizes[1:]]
        self.num_cache_tokens = runtime.kv.num_blocks * runtime.kv.block_size
        self._added: dict[str, _MadeUp] = {}  # key: request id
        self._new: list[AddRequest] = []
        self._ended: list[str] = []
        self._step_id = 0

    def add(
        self,
        name: str,
        *,
        num_prompt_tokens: int,
        first_slot: int,
        num_tokens: int,
        params: SamplingParams = _GREEDY,
    ) -> None:
        """Add a request; steps may compute any part of it.

        Args:
            num_prompt_tokens: known from the start.
            first_slot: its first slot in the cache; a multiple of the block size.
            num_tokens: that it has room for.
        """
        first_block = first_slot // self._block_size
        end_block = first_block - (-num_tokens // self._block_size)
        tokens = token_array(
            (_FIRST_TOKEN + 7 * (first_block + i) % _NUM_TOKENS) % self._vocab_size
            for i in range(num_prompt_tokens)
        )
        request = AddRequest(request_id=name, prompt_token_ids=tokens, params=params)
        self._added[name] = _MadeUp(
            request,
            tuple(range(first_block, end_block)),
            window_tables(self._window_blocks, first_block, end_block),
        )
        self._new.append(request)

    def end(self) -> None:
        """End all requests."""
        fresh = {request.request_id for request in self._new}
        self._ended += [name for name in self._added if name not in fresh]
        self._added.clear()
        self._new.clear()

    def fill(self, num_tokens: int, *, prompt: int, chunk: int) -> None:
        """Write this much of the cache: memory that was never written reads faster than in use."""
        for first_slot in range(0, num_tokens - prompt + 1, prompt):
            name = f"fill {first_slot}"
            self.add(name, num_prompt_tokens=prompt, first_slot=first_slot, num_tokens=prompt)
            for start in range(0, prompt, chunk):
                self.run([self.chunk(name, start, min(chunk, prompt - start))])
            self.end()

    def chunk(self, name: str, start: int, num_tokens: int) -> ScheduledChunk:
        """Return a chunk; its last row is sampled if it reaches the end of the prompt."""
        request, blocks, window_blocks = self._added[name]
        is_last = start + num_tokens >= len(request.prompt_token_ids)
        kind: ChunkKind = "decode" if num_tokens == 1 else "prefill"
        return ScheduledChunk(
            name,
            start,
            num_tokens,
            blocks,
            int(is_last),
            kind,
            window_block_ids=window_blocks,
        )

    def run(self, chunks: Sequence[ScheduledChunk]) -> TimedStep:
        """Run one step alone."""
        (step,) = self.run_all([chunks])
        return step

    def run_all(
        self, steps: Iterable[Sequence[ScheduledChunk]], *, depth: int | None = None
    ) -> list[TimedStep]:
        """Run steps in order, with as many in flight as the executor takes.

        Args:
            depth: the most steps in flight.
        """
        return list(self._run_all(steps, min(depth or self._executor.depth, self._executor.depth)))

    def _run_all(
        self, steps: Iterable[Sequence[ScheduledChunk]], depth: int
    ) -> Iterator[TimedStep]:
        begun_s: deque[float] = deque()
        ended_s = 0.0
        for chunks in steps:
            if len(begun_s) == depth:
                step, ended_s = self._collect(begun_s.popleft(), ended_s)
                yield step
            begun_s.append(time.perf_counter())
            self._executor.submit(self._plan(chunks))
        while begun_s:
            step, ended_s = self._collect(begun_s.popleft(), ended_s)
            yield step

    def _collect(self, begun_s: float, last_s: float) -> tuple[TimedStep, float]:
        result = self._executor.collect()
        ended_s = time.perf_counter()
        assert not result.faults, result.faults
        return TimedStep(ended_s - max(begun_s, last_s), result.seconds), ended_s

    def _plan(self, chunks: Sequence[ScheduledChunk]) -> StepPlan:
        self._step_id += 1
        plan = StepPlan(
            step_id=self._step_id,
            chunks=tuple(chunks),
            new_requests=tuple(self._new),
            ended_requests=tuple(self._ended),
        )
        self._new.clear()
        self._ended.clear()
        return plan
