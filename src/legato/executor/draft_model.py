"""Drafts tokens with a small model, which has a KV cache of its own.

It guesses greedily, one token for all requests in each pass. Keys of wrong guesses are overwritten.
It learns the chance that a guess is right from verified guesses, by the probability that the model
gave each (Leviathan et al., 2023, arXiv:2211.17192, assume one rate).
"""

import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from legato.core.plan import ScheduledChunk
from legato.core.request import AddRequest, Request
from legato.core.sampling_params import SamplingParams
from legato.core.step_record import DrafterName
from legato.core.token_ids import token_array
from legato.executor.attention.attention_backend import AttentionBackend
from legato.executor.batch import pack
from legato.executor.cache_memory import raising_memory_error
from legato.executor.sequence import SequenceState
from legato.executor.torch_executor import torch_threads
from legato.kv.block_pool import BlockPool
from legato.model.model import Model
from legato.speculation.drafter import Draft, Drafted
from legato.speculation.pass_times import PassTimes
from legato.speculation.survival import Luck, Rates

logger = logging.getLogger(__name__)

_SURE = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Lower bounds of probability that separate the kinds of guesses."""
_SURE_PRIORS = (0.05, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.93, 0.96)
_DEPTH_PRIORS = (0.7,) * 16
"""Initial chances that the first guess is right, the second, and so on."""
_MOST_ROWS = 512
"""Most tokens of one pass."""
_MEASURED = (1, 2, 4, 8, 16, 32, 64, 128, 256, _MOST_ROWS)
_LONGEST_MEASURED_S = 0.3
"""Stop measuring at start-up after a pass this long; larger passes are extrapolated."""


class _Row:
    """The draft model's state of one request.

    Attributes:
        sequence: known tokens, then guesses.
        num_computed: tokens with keys in the cache, guesses included.
        guesses, kinds, chances: of the last draft.
        most: guesses wanted.
        survival: chance that all guesses are right.
        luck, depth_luck: how its guesses fare against the rates of kinds, and of depths.
    """

    __slots__ = (
        "block_ids",
        "chances",
        "depth_luck",
        "guesses",
        "kinds",
        "luck",
        "most",
        "num_computed",
        "sequence",
        "survival",
    )

    def __init__(self, request: Request) -> None:
        self.sequence = SequenceState(request.message)
        self.block_ids: list[int] = []
        self.num_computed = self.most = 0
        self.luck, self.depth_luck = Luck(), Luck()
        self.begin()

    def begin(self) -> None:
        """Drop all guesses."""
        self.guesses: list[int] = []
        self.kinds: list[int] = []
        self.chances: list[float] = []
        self.survival = 1.0

    @property
    def end(self) -> int:
        """Number of tokens, guesses included."""
        return self.sequence.num_tokens + len(self.guesses)

    def draft(self, name: DrafterName) -> Draft | None:
        """Return its guesses as a draft; None if there are none."""
        return Draft(name, tuple(self.guesses), tuple(self.chances)) if self.guesses else None

    def guess(self, token_id: int, kind: int, chance: float) -> None:
        self.guesses.append(token_id)
        self.kinds.append(kind)
        self.chances.append(chance)
        self.survival *= chance
        self.sequence.guess(self.guesses, self.sequence.num_tokens)


class DraftModel:
    """A `CostlyDrafter` that runs a model.

    It drafts nothing for a request that does not fit in its cache.

    Args:
        attention: owns the model's cache, of `num_blocks` blocks.
        max_len: tokens for which the model has positions.
        clock: in seconds.
    """

    name: DrafterName = "model"

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        max_len: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = model
        self._attention = attention
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._max_len = min(max_len, num_blocks * block_size)
        self._clock = clock
        self._rows: dict[str, _Row] = {}  # key request id
        self._rates = Rates(_SURE_PRIORS)
        self._depths = Rates(_DEPTH_PRIORS)
        self._is_broken = False
        self._times = self._measure(vocab_size)

    @property
    def cache_bytes(self) -> int:
        """Size of its cache."""
        return sum(blocks.nbytes for blocks in self._attention.blocks)

    def advance(self, request: Request) -> None:
        row = self._rows.get(request.request_id)
        if row is None:
            return
        if not row.guesses:
            row.luck.recover()
            row.depth_luck.recover()
        self._take(row, request)

    def skip_step(self) -> None:
        self._depths.recover()

    def outlook(self, request: Request, most: int) -> Sequence[float]:
        most = min(most, self._max_len - request.num_tokens)
        row = self._rows.get(request.request_id)
        if most <= 0 or self._is_broken or not self._has_room(request.num_tokens + most, row):
            return ()
        luck = Luck() if row is None else row.depth_luck
        return [luck.chance(self._depths[_depth_kind(depth)]) for depth in range(most)]

    def num_missing(self, request: Request) -> int:
        row = self._rows.get(request.request_id)
        num_computed = 0 if row is None else min(row.num_computed, row.sequence.num_tokens)
        return max(1, request.num_tokens - num_computed)

    def pass_s(self, num_rows: int) -> float:
        return self._times.seconds(num_rows)

    def catch_up(self, requests: Sequence[Request], within_s: float) -> float:
        begun_s = self._clock()
        if self._is_broken:
            return 0.0
        with self._breaking_alone():
            self._catch_up(requests, self._times.most_rows(within_s, _MOST_ROWS))
        return self._clock() - begun_s

    def draft(
        self, requests: Sequence[Request], counts: Sequence[int], *, token_s: float, within_s: float
    ) -> Drafted:
        begun_s = self._clock()
        drafts: list[Draft | None] = [None] * len(requests)
        if self._is_broken:
            return Drafted(drafts, 0.0)
        with self._breaking_alone():
            rows = [self._ready(r, count) for r, count in zip(requests, counts, strict=True)]
            self._guess([row for row in rows if row is not None], token_s, begun_s + within_s)
            drafts = [None if row is None else row.draft(self.name) for row in rows]
        return Drafted(drafts, self._clock() - begun_s)

    def forget(self, request: Request) -> None:
        row = self._rows.pop(request.request_id, None)
        if row is not None:
            self._pool.free(row.block_ids)

    @contextmanager
    def _breaking_alone(self) -> Iterator[None]:
        """Stop drafting for good after an error: streams go on without drafts."""
        try:
            with raising_memory_error(), torch.inference_mode():
                yield
        except Exception:
            logger.exception("the draft model failed, and drafts nothing any more")
            self._is_broken = True

    def _take(self, row: _Row, request: Request) -> None:
        """Compare the guesses with the tokens that were sampled, and append these."""
        sequence = row.sequence
        came = request.token_ids[sequence.num_tokens :]
        num_right = 0
        for depth, (guess, token_id) in enumerate(zip(row.guesses, came, strict=False)):
            is_right = guess == token_id
            kind, depth_kind = row.kinds[depth], _depth_kind(depth)
            row.luck.observe(self._rates[kind], is_right=is_right)
            row.depth_luck.observe(self._depths[depth_kind], is_right=is_right)
            self._rates.observe(kind, is_right=is_right)
            self._depths.observe(depth_kind, is_right=is_right)
            if not is_right:
                break
            num_right += 1
        row.num_computed = min(row.num_computed, sequence.num_tokens + num_right)
        for token_id in came:
            sequence.append(token_id)
        row.begin()

    def _row(self, request: Request) -> _Row:
        row = self._rows.get(request.request_id)
        if row is None:
            row = self._rows[request.request_id] = _Row(request)
        self._take(row, request)
        return row

    def _ready(self, request: Request, count: int) -> _Row | None:
        """Return the request's row with room for `count` guesses; None if there is no room."""
        row = self._row(request)
        row.most = count
        # The last known token is always computed: the first guess comes from its logits.
        row.num_computed = min(row.num_computed, request.num_tokens - 1)
        return row if self._reserve(row, request.num_tokens + count) else None

    def _guess(self, rows: list[_Row], token_s: float, until_s: float) -> None:
        """Guess a token a pass, for the rows where another guess is worth its time."""
        while rows:
            self._pass([(row, row.end - row.num_computed) for row in rows], guesses=True)
            share_s = self.pass_s(len(rows)) / len(rows)
            rows = [
                row
                for row in rows
                if len(row.guesses) < row.most and token_s * self._next_survival(row) > share_s
            ]
            if self._clock() + self.pass_s(len(rows)) > until_s:
                return

    def _next_survival(self, row: _Row) -> float:
        depth_kind = _depth_kind(len(row.guesses))
        return row.survival * row.depth_luck.chance(self._depths[depth_kind])

    def _catch_up(self, requests: Sequence[Request], num_rows: int) -> None:
        counts: list[tuple[_Row, int]] = []
        for request in requests:
            row = self._row(request)
            count = min(num_rows, request.num_tokens - 1 - row.num_computed)
            if count > 0 and self._reserve(row, row.num_computed + count):
                counts.append((row, count))
                num_rows -= count
        if counts:
            self._pass(counts, guesses=False)

    def _pass(self, counts: Sequence[tuple[_Row, int]], *, guesses: bool) -> None:
        """Compute the next tokens of each row; with `guesses`, guess the token after them."""
        begun_s = self._clock()
        chunks = [
            ScheduledChunk("", row.num_computed, count, row.block_ids, int(guesses), "prefill")
            for row, count in counts
        ]
        tops = self._compute(chunks, [row.sequence for row, _ in counts])
        for row, count in counts:
            row.num_computed += count
        for (row, _), (token_id, probability) in zip(counts, tops, strict=False):
            kind = bisect_right(_SURE, probability)
            row.guess(token_id, kind, row.luck.chance(self._rates[kind]))
        self._times.observe(sum(count for _, count in counts), self._clock() - begun_s)

    def _compute(
        self, chunks: Sequence[ScheduledChunk], sequences: Sequence[SequenceState]
    ) -> list[tuple[int, float]]:
        """Return the likeliest token after each sampled row, and its probability."""
        with torch_threads(self._model.num_torch_threads):
            batch = pack(
                chunks,
                sequences,
                block_size=self._block_size,
                device=self._model.device,
                padding=self._model.rows,
            )
            step = self._attention.begin_step(batch)
            hidden = self._model.forward(batch.input_ids, batch.positions, step)
            num_samples = sum(chunk.num_samples for chunk in chunks)
            if not num_samples:
                return []
            logits = self._model.compute_logits(hidden[batch.sample_rows])[:num_samples]
            top = logits.max(dim=-1)
            probabilities = (top.values - logits.logsumexp(dim=-1)).exp().tolist()
        if not all(map(math.isfinite, probabilities)):
            raise ValueError("it computes NaN or infinities")
        return list(zip(top.indices.tolist(), probabilities, strict=True))

    def _has_room(self, num_tokens: int, row: _Row | None) -> bool:
        num_own = 0 if row is None else len(row.block_ids)
        return self._num_blocks(num_tokens) - num_own <= self._pool.num_free

    def _reserve(self, row: _Row, num_tokens: int) -> bool:
        num_missing = self._num_blocks(num_tokens) - len(row.block_ids)
        if num_missing <= 0:
            return True
        last = row.block_ids[-1] if row.block_ids else None
        block_ids = self._pool.allocate(num_missing, after=last)
        if block_ids is not None:
            row.block_ids = [*row.block_ids, *block_ids]  # `block_row` sees a change by identity
        return block_ids is not None

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _measure(self, vocab_size: int) -> PassTimes:
        """Time passes over a made-up prompt, two of each size: the first compiles kernels."""
        measured: list[tuple[int, float]] = []
        with torch.inference_mode():
            for num_rows in _MEASURED:
                if num_rows > self._max_len or (measured and measured[-1][1] > _LONGEST_MEASURED_S):
                    break
                measured.append(
                    (num_rows, min(self._measured_s(num_rows, vocab_size) for _ in range(2)))
                )
        return PassTimes(measured)

    def _measured_s(self, num_rows: int, vocab_size: int) -> float:
        prompt = AddRequest(
            request_id="measured",
            prompt_token_ids=token_array(i % vocab_size for i in range(num_rows)),
            params=SamplingParams(max_tokens=1),
        )
        blocks = range(self._num_blocks(num_rows))
        chunk = ScheduledChunk(prompt.request_id, 0, num_rows, blocks, 1, "prefill")
        begun_s = self._clock()
        self._compute([chunk], [SequenceState(prompt)])
        return self._clock() - begun_s


def _depth_kind(depth: int) -> int:
    return min(depth, len(_DEPTH_PRIORS) - 1)
