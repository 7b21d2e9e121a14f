"""Rows dropped inside a step: which ones, and that nothing else of the step changes."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, pairwise, repeat

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.core.plan import Deadline, ScheduledChunk, StepPlan
from legato.core.request import AddRequest
from legato.core.rows import CPU_ROWS, UNPADDED, RowCounts
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.executor.attention.attention_backend import AttentionBackend
from legato.executor.attention.torch_backend import TorchAttentionBackend
from legato.executor.batch import pack
from legato.executor.deadline import LAYERS_A_LOOK, DeadlineWatch
from legato.executor.sequence import SequenceState
from legato.executor.torch_executor import TorchExecutor
from legato.model.model import CacheSpec, LayerCache, Model
from legato.model.spec import LayerInputsSpec
from tests.executor.backends import BLOCK_SIZE, EXACT, NATIVE, Backend, params
from tests.executor.by_hand import NUM_BLOCKS, ByHand, Stream, prompt
from tests.model.random_models import CPU, VOCAB_SIZE, decoder_spec
from tests.profiles import examples

NUM_LAYERS = 22
LOOKS = (10, 15, 20)
"""Layers after which rows may be dropped."""
SPEC = decoder_spec(
    sliding_windows=(45, None) * (NUM_LAYERS // 2),
    qkv_bias=True,
    residual_scale=0.3,
    layer_inputs=LayerInputsSpec(size=32, vocab_size=VOCAB_SIZE),
)
ALWAYS_LATE = Deadline(layers_s=0.0, late_s=1e9, prefill_share=0.9)

# A row is computed in the same way here, however many rows there are. Emulated kernels share all
# that matters here with the running ones.
on_backends = pytest.mark.parametrize(
    "backend", params([EXACT, *(backend for backend in NATIVE if backend.kernels == backend.name)])
)


class Ticks:
    """A clock that moves on by the next of some seconds whenever it is read, at last by 1."""

    def __init__(self, ticks_s: Sequence[float] = ()) -> None:
        self._ticks_s: Iterator[float] = chain(ticks_s, repeat(1.0))
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += next(self._ticks_s)
        return self._now_s


@cache
def made(backend: Backend) -> tuple[Model, AttentionBackend]:
    return backend.make(SPEC, NUM_BLOCKS)


def served(
    backend: Backend, clock: Ticks, deadline: Deadline | None, seed: int = 0
) -> dict[str, Stream]:
    """Two streams with drafts, beside which prompts are computed: two to be continued, one of whose
    tokens are scored, and one to be pooled.
    """
    model, attention = made(backend)
    attention.blocks[0].fill_(torch.nan)  # what was not written must not be read
    executor = TorchExecutor(model, attention, BLOCK_SIZE, clock=clock)
    assert executor.drops_rows
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(seed))
    hand = ByHand(executor, order.tolist())
    streams = {name: hand.add(name, prompt(5, i), max_tokens=20) for i, name in enumerate("ab")}
    hand.step(a=5, b=5)
    streams["c"] = hand.add("c", prompt(130, 2), max_tokens=4, prompt_logprobs=1, logprobs=1)
    streams["d"] = hand.add("d", prompt(20, 3), max_tokens=4, temperature=1.0, seed=7)
    streams["e"] = hand.add("e", prompt(70, 4), pooling="mean")
    while any(_num_missing(stream) for name, stream in streams.items() if name in "cde"):
        chunks = {name: 1 for name in "ab" if streams[name].num_left}
        drafts = {"b": [3, 4]} if streams["b"].num_left > 3 else {}
        for name, most in (("c", 47), ("d", 64), ("e", 33)):
            if count := min(most, _num_missing(streams[name])):
                chunks[name] = count
        hand.step(drafts, deadline, **chunks)
    hand.finish()
    streams["all"] = Stream(streams["a"].message, [])
    streams["all"].num_computed = sum(len(result.cuts) for result in hand.results)
    return streams


def _num_missing(stream: Stream) -> int:
    return max(0, stream.num_prompt_tokens - stream.num_computed)


@cache
def undropped(backend: Backend) -> dict[str, Stream]:
    return served(backend, Ticks(), None)


def check(backend: Backend, clock: Ticks, deadline: Deadline, seed: int = 0) -> dict[str, Stream]:
    expected, found = undropped(backend), served(backend, clock, deadline, seed)
    for name in "abcd":
        assert found[name].tokens == expected[name].tokens
        assert not (name in "ab" and found[name].num_dropped)
    for ours, theirs in (
        (found["c"].prompt_logprobs, expected["c"].prompt_logprobs),
        (found["c"].logprobs, expected["c"].logprobs),
    ):
        assert len(ours) == len(theirs) > 0
        for one, other in zip(ours, theirs, strict=True):
            assert one.token_id == other.token_id
            assert abs(one.logprob - other.logprob) < 0.5 * backend.tolerance
    ours, theirs = found["e"].pooled, expected["e"].pooled
    assert ours is not None
    assert theirs is not None
    np.testing.assert_allclose(
        np.frombuffer(ours, np.float32),
        np.frombuffer(theirs, np.float32),
        atol=0.2 * backend.tolerance,
    )
    return found


@on_backends
@given(
    ticks_s=st.lists(st.sampled_from([1.0, 1.0, 1.0, 4.0]), max_size=60),
    layers_s=st.floats(1.0, 7.0),
    share=st.sampled_from([0.9, 0.5, 0.2]),
    seed=st.integers(0, 99),
)
@examples(12)
def test_rows_dropped_at_any_layer_show_in_no_token(
    backend: Backend, ticks_s: list[float], layers_s: float, share: float, seed: int
) -> None:
    check(backend, Ticks(ticks_s), Deadline(layers_s, 1e9, share), seed)


@on_backends
@pytest.mark.parametrize("look", range(len(LOOKS)))
def test_rows_are_dropped_after_each_look(backend: Backend, look: int) -> None:
    """All looks of the first step that may drop are in time but one; later steps drop at once."""
    before = [1.0] * 2 + [1.0, 1.0] + [1.0] * (LOOKS[look] // LAYERS_A_LOOK - 1)
    late = Deadline(layers_s=200.0, late_s=1e9, prefill_share=0.9)
    found = check(backend, Ticks([*before, 500.0]), late)
    assert found["all"].num_computed == 1
    found = check(backend, Ticks(), ALWAYS_LATE)
    assert found["all"].num_computed > 3
    assert found["c"].num_dropped
    assert found["e"].num_dropped


class Watched:
    """A watch over the layers of a step: some decodes, then prompts, on a clock of its own.

    Args:
        paces_s: seconds of a layer with all rows, for each group of layers between looks.
    """

    def __init__(
        self,
        num_decodes: int,
        chunks: Sequence[int],
        deadline: Deadline,
        paces_s: Sequence[float],
        row_counts: RowCounts = CPU_ROWS,
    ) -> None:
        self.now_s = 0.0
        self.deadline, self.paces_s = deadline, paces_s
        sizes = [*[1] * num_decodes, *chunks]
        self.plan = StepPlan(
            step_id=0,
            chunks=tuple(
                ScheduledChunk(
                    str(i), 0, n, (0,) * 40, 1, "decode" if i < num_decodes else "prefill"
                )
                for i, n in enumerate(sizes)
            ),
            deadline=deadline,
        )
        sequences = [
            SequenceState(
                AddRequest(
                    request_id=str(i),
                    prompt_token_ids=token_array(range(n)),
                    params=SamplingParams(max_tokens=1),
                )
            )
            for i, n in enumerate(sizes)
        ]
        batch = pack(
            self.plan.chunks, sequences, block_size=BLOCK_SIZE, device=CPU, padding=row_counts
        )
        cache = CacheSpec(layers=(LayerCache(1, 8),), dtype=torch.float32)
        backend = TorchAttentionBackend(cache, num_blocks=1, block_size=BLOCK_SIZE, device=CPU)
        self.num_rows, self.num_prefill = sum(sizes), sum(chunks)
        self.watch = DeadlineWatch(self.plan, batch, backend, row_counts, lambda: self.now_s, 0.0)

    def run(self) -> list[int]:
        """Return the rows that each group of layers computed, and take the time for it."""
        num_layers, num_rows = LAYERS_A_LOOK * len(self.paces_s), self.num_rows
        looks = self.watch.looks(num_layers)
        assert list(looks) == list(range(LAYERS_A_LOOK, num_layers, LAYERS_A_LOOK))
        counts = []
        for pace_s, look in zip(self.paces_s, [*looks, None], strict=True):
            dropped = (self.num_rows - num_rows) / self.num_prefill
            self.now_s += LAYERS_A_LOOK * pace_s * (1.0 - self.deadline.prefill_share * dropped)
            counts.append(num_rows)
            kept = None if look is None else self.watch.look(look)
            if kept is not None:
                assert kept.num_rows < num_rows
                num_rows = kept.num_rows
        assert num_rows == self.watch.num_rows
        return counts


@given(
    num_decodes=st.integers(1, 20),
    chunks=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    interrupted=st.lists(st.sampled_from([0.0, 0.0, 0.0, 1.0, 4.0]), min_size=4, max_size=8),
    left=st.floats(0.3, 1.5),
    share=st.floats(0.0, 0.95),
    row_counts=st.sampled_from([CPU_ROWS, UNPADDED]),
)
def test_what_is_dropped_keeps_the_deadline_and_what_must_be_kept(
    num_decodes: int,
    chunks: list[int],
    interrupted: list[float],
    left: float,
    share: float,
    row_counts: RowCounts,
) -> None:
    """`left`: of the undisturbed step's time; `interrupted`: in layers, for each group of them."""
    paces_s = [1.0 + longer for longer in interrupted]
    layers_s = left * LAYERS_A_LOOK * len(paces_s)
    deadline = Deadline(layers_s, late_s=1.2 * layers_s, prefill_share=share)
    watched = Watched(num_decodes, chunks, deadline, paces_s, row_counts)
    counts = watched.run()
    least = num_decodes + min(16, chunks[0])
    assert counts[:2] == [watched.num_rows] * 2  # no pace is known before ten layers
    for before, after in pairwise(counts):
        assert before >= after >= min(least, watched.num_rows)
        assert after in (before, row_counts.full(after))
    foreseen_s = watched.watch.foreseen_s
    assert foreseen_s is not None
    if watched.watch.cuts:
        assert counts[-1] < watched.num_rows
        assert [cut.num_rows for cut in watched.watch.cuts] == sorted(
            set(counts) - {watched.num_rows}, reverse=True
        )
    if not any(interrupted) and left >= 1.0:
        assert counts[-1] == watched.num_rows
    if not any(interrupted):
        assert foreseen_s == pytest.approx(watched.now_s)
        is_least = counts[-1] <= row_counts.padded(least)
        # Deadlines that cannot be kept are given up.
        given_up = watched.now_s > deadline.late_s * 0.999 and not watched.watch.cuts
        assert foreseen_s <= layers_s * 1.001 or is_least or given_up or not share


def test_an_interruption_does_not_pass_for_a_slow_machine() -> None:
    """It takes as long as eight layers; there is room for nine."""
    deadline = Deadline(layers_s=39.0, late_s=45.0, prefill_share=0.9)
    for group in range(6):
        paces_s = [1.0] * 6
        paces_s[group] += 8.0 / LAYERS_A_LOOK
        watched = Watched(4, [200], deadline, paces_s)
        assert watched.run() == [204] * 6
        assert watched.now_s == pytest.approx(38.0)


def test_the_rows_that_are_dropped_make_up_for_an_interruption() -> None:
    deadline = Deadline(layers_s=31.0, late_s=36.0, prefill_share=0.9)
    watched = Watched(4, [200], deadline, [1.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    counts = watched.run()
    assert counts[:2] == [204, 204]
    assert 16 <= counts[2] < 204
    assert 29.0 < watched.now_s <= 31.0
    assert len(set(counts[2:])) == 1
