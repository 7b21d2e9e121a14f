"""Native recurrent mixers against PyTorch's over random runs, and bitwise against themselves."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.model.mixer_spec import DeltaNetSpec, Mamba2Spec, RecurrenceSpec
from legato.model.states import StateRun, StateShape, StepStates, make_states
from tests.executor.instructions import TESTED
from tests.model.test_recurrence import CPU, RECURRENCES, mixer
from tests.profiles import examples

MIXERS: dict[str, RecurrenceSpec] = {
    **RECURRENCES,
    "wide delta net": DeltaNetSpec(num_heads=2, num_key_heads=1, key_dim=128, value_dim=128),
    "wide mamba 2": Mamba2Spec(num_heads=2, num_groups=1, head_dim=64, state_size=256),
    "mamba 2 with limits": Mamba2Spec(
        num_heads=4,
        num_groups=2,
        head_dim=32,
        state_size=16,
        has_conv_bias=False,
        shortest_step=0.3,
        longest_step=1.5,
        kernel_size=2,
    ),
}


Length = tuple[int, int, bool]
"""Rows of a run, the position of its first one, and whether the state is kept after each row."""


def _num_kept(length: Length) -> int:
    return length[0] if length[2] else 1


class Step:
    """A step's runs with random states and projected rows, which have none of padding.

    Attributes:
        spec: of the mixer.
        dtype: of the inputs that states keep.
    """

    def __init__(
        self, spec: RecurrenceSpec, lengths: list[Length], seed: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.spec, self.dtype = spec, dtype
        shape: StateShape = spec.state
        self.num_slots = 1 + sum(1 + _num_kept(length) for length in lengths)
        self.kept = make_states([shape], self.num_slots, dtype, CPU)[0]
        for part in self.kept:
            part.copy_(torch.randn(part.shape, generator=generator))
        order = torch.randperm(self.num_slots, generator=generator).tolist()
        self.runs, start = [], 0
        for length in lengths:
            source, *earlier, destination = (order.pop() for _ in range(1 + _num_kept(length)))
            end, position = start + length[0], length[1]
            self.runs.append(StateRun(start, end, position, source, destination, tuple(earlier)))
            start = end
        width = len(mixer(spec).in_proj.weight)
        self.rows = torch.randn(start, width, generator=generator).to(dtype)

    @torch.inference_mode()
    def computed(
        self, implementation: str, runs: list[StateRun] | None = None, *, num_threads: int = 2
    ) -> list[torch.Tensor]:
        """Return outputs [T, ...] of some runs, or all, and all slots after the step."""
        module = mixer(self.spec, implementation, num_threads=num_threads)
        layer = type(self.kept)(*(part.clone() for part in self.kept))
        chosen = self.runs if runs is None else runs
        rows = torch.cat([self.rows[run.start : run.end] for run in chosen])
        placed, start = [], 0
        for run in chosen:
            placed.append(run._replace(start=start, end=start + run.end - run.start))
            start = placed[-1].end
        states = StepStates([layer], placed)
        if module.native is None:
            return [module.mixed(rows, states), *layer]
        return [module.native(rows, states, 0), *layer]


LENGTHS = st.lists(
    st.tuples(st.integers(1, 3) | st.integers(1, 200), st.integers(0, 130), st.just(False))
    | st.tuples(st.integers(1, 6), st.integers(0, 130), st.just(True)),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("name", MIXERS)
@given(lengths=LENGTHS, seed=st.integers(0, 1000), implementation=st.sampled_from(TESTED or [""]))
@examples(12)
@pytest.mark.skipif(not TESTED, reason="no native kernels run here")
def test_as_pytorch(name: str, lengths: list[Length], seed: int, implementation: str) -> None:
    """Within 2e-5 of the largest number."""
    step = Step(MIXERS[name], lengths, seed, torch.float32)
    for got, expected in zip(step.computed(implementation), step.computed("torch"), strict=True):
        if expected.numel():
            largest = float(expected.abs().max())
            torch.testing.assert_close(got, expected, rtol=0, atol=2e-5 * max(1.0, largest))


@pytest.mark.parametrize("name", MIXERS)
@given(
    lengths=LENGTHS,
    seed=st.integers(0, 1000),
    implementation=st.sampled_from(TESTED or [""]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@examples(8)
@pytest.mark.skipif(not TESTED, reason="no native kernels run here")
def test_a_run_has_the_same_bits_in_every_step(
    name: str, lengths: list[Length], seed: int, implementation: str, dtype: torch.dtype
) -> None:
    """Alone or beside others, on one thread or on three; slots of others stay as they are."""
    step = Step(MIXERS[name], lengths, seed, dtype)
    output, *slots = step.computed(implementation, num_threads=3)
    written = [slot for run in step.runs for _, slot in run.kept]
    others = [slot for slot in range(step.num_slots) if slot not in written]
    for part, before in zip(slots, step.kept, strict=True):
        if part.numel():
            assert torch.equal(part[others], before[others])
    for run in step.runs:
        alone, *own_slots = step.computed(implementation, [run], num_threads=1)
        assert torch.equal(alone, output[run.start : run.end])
        for own, part in zip(own_slots, slots, strict=True):
            for _, slot in run.kept if part.numel() else ():
                assert torch.equal(own[slot], part[slot])


@pytest.mark.parametrize("implementation", ["torch", *TESTED])
@pytest.mark.parametrize("name", MIXERS)
def test_states_that_are_kept_after_each_row_are_those_of_steps_of_one_row(
    name: str, implementation: str
) -> None:
    step = Step(MIXERS[name], [(2, 7, False), (5, 62, True)], 0, torch.bfloat16)
    run = step.runs[1]
    output, *slots = step.computed(implementation)
    source = run.source
    for end, slot in run.kept:
        row = end - 1
        alone, *after = step.computed(
            implementation, [StateRun(row, end, run.position + row - run.start, source, slot)]
        )
        assert torch.equal(alone, output[row:end])
        for kept, part, own in zip(step.kept, slots, after, strict=True):
            if part.numel():
                assert torch.equal(own[slot], part[slot])
                kept.copy_(own)
        source = slot


@pytest.mark.parametrize("implementation", TESTED)
@pytest.mark.parametrize("name", MIXERS)
def test_bfloat16_inputs_that_are_kept_give_the_same_bits_as_a_runs_own(
    name: str, implementation: str
) -> None:
    """A prompt that is cut at position 64 has the same outputs as a whole one."""
    whole = Step(MIXERS[name], [(100, 0, False)], 0, torch.bfloat16)
    [run] = whole.runs
    output, *slots = whole.computed(implementation)
    first = run._replace(end=64)
    begun, *after = whole.computed(implementation, [first])
    for kept, part in zip(whole.kept, after, strict=True):
        kept.copy_(part)
    second = StateRun(64, 100, 64, run.destination, run.source)
    rest, *ended = whole.computed(implementation, [second])
    assert torch.equal(torch.cat((begun, rest)), output)
    for part, expected in zip(ended, slots, strict=True):
        if part.numel():
            assert torch.equal(part[run.source], expected[run.destination])


def test_gates_do_not_lose_digits_behind_large_ones() -> None:
    """A small gate after one that forgets everything still counts."""
    for implementation in TESTED:
        step = Step(MIXERS["delta net"], [(64, 0, False)], 3, torch.float32)
        heads: Any = step.spec
        step.rows[::9, -heads.num_heads :] = 300.0
        got, expected = (step.computed(name)[0] for name in (implementation, "torch"))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
