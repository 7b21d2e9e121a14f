"""Measures how long steps of various shapes take, as a start for the step-time model."""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from legato.core.plan import ScheduledChunk, StateChange, StepPlan
from legato.core.request import AddRequest
from legato.core.rows import CPU_ROWS, RowCounts
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.engine.calibration.disturbance import LEAST_STEPS, coverage_gap, decode_counts
from legato.executor.executor import Executor
from legato.scheduler.cost_fit import MeasuredStep
from legato.scheduler.step_shape import StepShape

CALIBRATION_S = 10.0
_FILL_S = 0.6 * CALIBRATION_S
_SLOW_S = 2.0 * CALIBRATION_S
"""Time that a machine may take which has not measured `LEAST_STEPS` by then."""
_UNSURPRISING_S = 0.5
"""A step counts as no longer than this, or as twice the longest step before it. A longer one is a
pause of the machine, which is no reason to measure less."""
SHORTEST_CHUNK = 16
_CHUNKS = (SHORTEST_CHUNK, 64, 256, 1024, 4096)
MOST_DRAFTS = 16
"""Most drafts of a stream: each further draft costs the same."""
_DRAFTING_SHARE = 0.5
"""Share of the steps with decodes that have drafts, too."""
_MAX_OUTPUT = 16_384
"""More tokens than there are steps in the time."""

Progress = Callable[[float], None]


class Extent(NamedTuple):
    """Limits of a calibration.

    Attributes:
        longest_chunk, longest_context: in tokens.
        reads_unwritten: whether reading an unwritten block takes as long as reading a written one,
            as on a GPU. Decodes then read far more than was computed.
    """

    longest_chunk: int = 1024
    longest_context: int = 8192
    reads_unwritten: bool = False


ON_A_CPU = Extent()


class Calibration:
    """Runs made-up steps on an executor for about `CALIBRATION_S` seconds, pauses not counted.

    First it computes one long prompt in growing chunks, because reading a cache that was never
    written is faster. Then decodes and chunks, alone and together, read from it at various
    positions. If several steps can be in flight, each step is measured while another one is
    computed, because it is prepared then in service, too.

    Args:
        block_ids: blocks of the cache to write to; they must be empty.
        window_block_ids: likewise, in each window group of the cache.
        states: state slots of as many requests, which no request has; empty if the model has no
            recurrent layers. Each row of a step has its own, so that none reuses another's state.
        max_model_len: last position, if the time suffices.
        most_drafts: most drafts of a step; with 0, no step has drafts.
        rows: the numbers of rows to which the executor pads batches.
        extent: limits; chunks have `SHORTEST_CHUNK` tokens at least.
        longest_step_s: steps grow while they stay well below it.
        clock: returns seconds.

    Attributes:
        rows: as given.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        block_ids: Sequence[int],
        states: Sequence[StateChange] = (),
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        vocab_size: int,
        window_block_ids: Sequence[Sequence[int]] = (),
        most_drafts: int = 0,
        rows: RowCounts = CPU_ROWS,
        extent: Extent = ON_A_CPU,
        longest_step_s: float = 0.5,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.rows = rows
        self._executor = executor
        self._clock = clock
        self._block_ids = block_ids
        self._window_block_ids = window_block_ids
        self._states = states
        self._block_size = block_size
        num_tokens = len(block_ids) * block_size
        self._limit = min(max_model_len - 1, num_tokens, extent.longest_context)
        self._chunks = [size for size in _CHUNKS if size <= extent.longest_chunk]
        self._reads_unwritten = extent.reads_unwritten
        self._max_num_seqs = max_num_seqs
        self._most_drafts = most_drafts
        self._most_tokens = extent.longest_chunk + max_num_seqs
        self._longest_step_s = longest_step_s
        self._random = random.Random(0)
        self._prompt = token_array(self._random.choices(range(vocab_size), k=self._limit))
        self._known: set[str] = set()
        self._step_ids = itertools.count()
        self._num_cached = 0
        self._spent_s = 0.0
        self._longest_chunk = self._chunks[0]

    def run(self, progress: Progress) -> list[MeasuredStep]:
        """Measure all steps; `progress` is called with the share of the time that has passed."""
        measured: list[MeasuredStep] = []
        for step in self.steps():
            measured.append(step)
            progress(min(1.0, self._spent_s / CALIBRATION_S))
        progress(1.0)
        self.forget()
        return measured

    def steps(self) -> Iterator[MeasuredStep]:
        """Measure steps one by one; call `forget` after the last one."""
        longest_s, began_s, self._spent_s = 0.0, self._clock(), 0.0
        for number, chunks in enumerate(itertools.chain(self._fill(), self._shapes())):
            if self._spent_s > (CALIBRATION_S if number >= LEAST_STEPS else _SLOW_S):
                return
            step = self._measure(chunks)
            if step[1] < self._longest_step_s / 3:
                self._longest_chunk = max(self._longest_chunk, 2 * chunks[0].num_tokens)
            ended_s = self._clock()
            taken_s, began_s = ended_s - began_s, ended_s
            self._spent_s += min(taken_s, max(_UNSURPRISING_S, 2.0 * longest_s))
            longest_s = max(longest_s, taken_s)
            yield step

    def gap(self, steps: Sequence[MeasuredStep]) -> str:
        """Return which steps are missing among those measured, as `coverage_gap`."""
        return coverage_gap(
            steps, self.rows, max_num_seqs=self._max_num_seqs, num_tokens=self._limit
        )

    def forget(self) -> None:
        """Let the executor drop the requests; the next run ends the last one."""
        last = self._chunk("fill", 0, 1, samples=False)
        ended = tuple(self._known - {last.request_id})
        self._executor.submit(self._plan([last], ended))
        self._executor.collect()
        self._known = {last.request_id}

    def measure(self, *, num_rows: int, context: int, start: int, num_tokens: int) -> MeasuredStep:
        """Measure one step of decodes and a chunk; call it after `run`.

        Args:
            num_rows, context: decodes, and the keys that each reads, in whole blocks.
            start, num_tokens: the chunk's. It starts earlier, and is shorter, if `run` computed
                fewer tokens.
        """
        num_tokens = min(num_tokens, self._num_cached)
        chunk = self._chunk(
            "prefill", min(start, self._num_cached - num_tokens), num_tokens, samples=False
        )
        num_blocks = max(1, min(context, self._num_cached) // self._block_size)
        measured = self._measure([*self._rows(num_rows, num_blocks), chunk])
        self.forget()
        return measured

    def _fill(self) -> Iterator[list[ScheduledChunk]]:
        """Compute one prompt, in chunks that grow while they are short."""
        while self._num_cached < self._limit and self._spent_s < _FILL_S:
            num_tokens = min(self._longest_chunk, self._chunks[-1], self._limit - self._num_cached)
            yield [self._chunk("fill", self._num_cached, num_tokens, samples=False)]
            self._num_cached += num_tokens

    def _shapes(self) -> Iterator[list[ScheduledChunk]]:
        """Yield mixtures of decodes and prefill, the whole range in every round.

        Few and many decodes come first, with few and many keys: a slow machine measures no more.
        """
        rows = decode_counts(self._max_num_seqs)
        middle = rows[len(rows) // 2]
        for num_rows, share in ((rows[-1], 0.0), (rows[0], 1.0), (middle, 0.5), (rows[-1], 1.0)):
            longest = min(self._num_readable // num_rows, self._num_cached // self._block_size)
            yield [*self._rows(num_rows, max(1, int(share * longest)))]
        chunks = [n for n in self._chunks if n <= min(self._longest_chunk, self._num_cached)]
        while True:
            mixtures = [*itertools.product([0, *rows], [0, *chunks])][1:]
            self._random.shuffle(mixtures)
            for num_rows, num_tokens in mixtures:
                # The request with the chunk is one of the running requests.
                num_decodes = min(num_rows, self._max_num_seqs - bool(num_tokens))
                room = min(self._most_drafts, self._most_tokens - num_decodes - num_tokens)
                yield [*self._decodes(num_decodes, room), *self._prefill(num_tokens)]

    def _decodes(self, num_rows: int, most_drafts: int) -> Iterator[ScheduledChunk]:
        """Yield decodes that read different blocks, so that none reuses another's keys."""
        if not num_rows:
            return
        num_drafts = min(MOST_DRAFTS, most_drafts // num_rows)
        if num_drafts:
            is_drafting = self._random.random() < _DRAFTING_SHARE
            num_drafts = self._random.randint(1, num_drafts) if is_drafting else 0
        room = min(self._num_readable // num_rows, self._num_cached // self._block_size)
        yield from self._rows(num_rows, self._random.randint(1, max(1, room)), num_drafts)

    def _rows(
        self, num_rows: int, num_blocks: int, num_drafts: int = 0
    ) -> Iterator[ScheduledChunk]:
        """Yield decodes that read so many blocks each, with their drafts."""
        end = min(num_blocks * self._block_size, self._num_cached)
        num_drafts = min(num_drafts, end - 1)
        start = end - 1 - num_drafts
        # Equal tokens would pick the same experts.
        num_tokens = min(self._block_size, start + 1) if self.rows.experts else 1
        for row in range(num_rows):
            first = row * num_blocks % max(1, self._num_readable - num_blocks + 1)
            # All rows are tokens of the prompt, so that they write what the blocks hold already.
            own = start - row % num_tokens
            yield ScheduledChunk(
                f"calibration-row-{row}",
                own,
                1 + num_drafts,
                tuple(self._block_ids[first : first + num_blocks]),
                1 + num_drafts,
                "verify" if num_drafts else "decode",
                draft_token_ids=tuple(self._prompt[own + 1 : own + 1 + num_drafts]),
                state=self._state(row, num_drafts),
                window_block_ids=window_tables(self._window_block_ids, first, first + num_blocks),
            )

    def _state(self, row: int, num_drafts: int) -> StateChange | None:
        """Return slots of a row: one to read, which no step writes, and one for each token."""
        if not self._states:
            return None
        count, num_states = 1 + num_drafts, len(self._states)
        own = [self._states[(row * count + i) % num_states].destination for i in range(count)]
        return StateChange(self._states[row % num_states].source, own[-1], tuple(own[:-1]))

    @property
    def _num_readable(self) -> int:
        """Number of blocks, from the first on, that take as long to read as in service."""
        all_blocks = len(self._block_ids)
        return all_blocks if self._reads_unwritten else self._num_cached // self._block_size

    def _prefill(self, num_tokens: int) -> Iterator[ScheduledChunk]:
        if num_tokens:
            # Other lengths than the bounds of the cost model's segments: service has all lengths.
            num_tokens -= self._random.randrange(num_tokens // 2)
            start = self._random.randrange(self._num_cached - num_tokens + 1)
            yield self._chunk("prefill", start, num_tokens, samples=self._random.random() < 0.2)

    def _chunk(self, name: str, start: int, num_tokens: int, *, samples: bool) -> ScheduledChunk:
        num_blocks = -(-(start + num_tokens) // self._block_size)
        return ScheduledChunk(
            f"calibration-{name}",
            start,
            num_tokens,
            tuple(self._block_ids[:num_blocks]),
            int(samples),
            "prefill",
            state=self._states[-1] if self._states else None,
            window_block_ids=window_tables(self._window_block_ids, 0, num_blocks),
        )

    def _measure(self, chunks: list[ScheduledChunk]) -> MeasuredStep:
        plans = [self._plan(chunks) for _ in range(self._executor.depth)]
        for number, plan in enumerate(plans):
            try:
                self._executor.submit(plan)
            except Exception:
                with suppress(Exception):  # earlier steps: no other code knows them
                    for _ in range(number):
                        self._executor.collect()
                raise
        results = [self._executor.collect() for _ in plans]
        return StepShape.of(plans[-1]), results[-1].seconds

    def _plan(self, chunks: list[ScheduledChunk], ended: tuple[str, ...] = ()) -> StepPlan:
        new = [chunk.request_id for chunk in chunks if chunk.request_id not in self._known]
        self._known.update(new)
        return StepPlan(
            step_id=next(self._step_ids),
            chunks=tuple(chunks),
            new_requests=tuple(map(self._request, new)),
            ended_requests=ended,
        )

    def _request(self, request_id: str) -> AddRequest:
        return AddRequest(
            request_id=request_id,
            prompt_token_ids=self._prompt,
            params=SamplingParams(temperature=0.0, seed=0, max_tokens=_MAX_OUTPUT),
        )


def window_tables(
    window_block_ids: Sequence[Sequence[int]], first: int, end: int
) -> tuple[tuple[int, ...], ...]:
    """Return entries [first, end) of a block table of each window group.

    The groups have fewer blocks than the first group, so they take turns.

    Args:
        window_block_ids: blocks of each group.
    """
    return tuple(
        tuple(block_ids[i % len(block_ids)] for i in range(first, end))
        for block_ids in window_block_ids
    )
