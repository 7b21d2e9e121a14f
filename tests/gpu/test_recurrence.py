"""Recurrent mixers' kernels against recurrences in float64, however a request is cut."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from legato.gpu.state_work import StateWork, StateWorkShape
from legato.model.delta_net import DeltaNet
from legato.model.mamba2 import Mamba2
from legato.model.mixer_spec import DeltaNetSpec, Mamba2Spec, RecurrenceSpec, ShortConvSpec
from legato.model.recurrence import PIECE, RecurrentMixer, ShortConv
from legato.model.states import LayerStates, StateRun, make_states
from tests.gpu.numbers import DTYPES
from tests.model.test_native_recurrence import MIXERS
from tests.model.test_recurrence import HIDDEN, delta_rule, mixer, state_space
from tests.profiles import examples

SPECS: dict[str, RecurrenceSpec] = {
    name: MIXERS[name]
    for name in (
        "short convolution",
        "delta net",
        "mamba 2",
        "mamba 2 without a norm",
        "mamba 2 with limits",
    )
} | {
    "a long convolution without biases": ShortConvSpec(num_channels=HIDDEN, kernel_size=6),
    "delta net of sizes between powers of two": DeltaNetSpec(
        num_heads=2, num_key_heads=1, key_dim=24, value_dim=40, kernel_size=2
    ),
    "mamba 2 in blocks, normed first": Mamba2Spec(
        num_heads=2, num_groups=1, head_dim=48, state_size=130, norm="before_gate"
    ),
}
KINDS = ("short convolution", "delta net", "mamba 2")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NEAR = {"rtol": 1e-4, "atol": 2e-5}
"""Tolerances of float32 over many tokens."""
NUM_SLOTS = 14


def work_of(runs: Sequence[StateRun], num_rows: int, device: torch.device) -> StateWork:
    """As a step's inputs have it."""
    has_chunks = any(run.end - run.start > 1 for run in runs)
    shape = StateWorkShape.of(num_rows, len(runs) + 2, has_chunks=has_chunks)
    section = np.full(sum(shape.sizes), 77, dtype=np.int32)
    shape.write(section, runs)
    return shape.views(torch.from_numpy(section).to(device))


class Layer:
    """A mixer, and the slots of its states: zeros in slot 0, and numbers in the others."""

    def __init__(self, spec: RecurrenceSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.module = mixer(spec)
        self.module.to(device)
        for linear in (self.module.in_proj, self.module.conv):
            linear.to(dtype)
        self.width = len(self.module.in_proj.weight)
        [self.states] = make_states([spec.state], NUM_SLOTS, dtype, device)
        for part in self.states:
            part[1:] = torch.randn(part[1:].shape).to(part)

    @torch.inference_mode()
    def mix(self, projected: torch.Tensor, runs: Sequence[StateRun]) -> torch.Tensor:
        """Compute rows [P, width], the last ones padding, in memory full of NaN."""
        from legato.gpu.recurrence import mix

        work = work_of(runs, len(projected), projected.device)
        torch.use_deterministic_algorithms(True)  # it also fills new memory
        try:
            return mix(self.module, projected, work, self.states)
        finally:
            torch.use_deterministic_algorithms(False)


def exact(module: RecurrentMixer, rows: torch.Tensor, states: LayerStates) -> torch.Tensor:
    """Return a run's outputs, and advance its states; all in float64."""
    if isinstance(module, ShortConv):
        before, after, inputs = rows.chunk(3, dim=1)
        return after * convolved(module, before * inputs, states)
    if isinstance(module, DeltaNet):
        heads, key_size = module.num_heads, module.num_key_heads * module.key_dim
        size = heads * module.value_dim
        inputs, z, b, a = rows.split([2 * key_size + size, size, heads, heads], dim=1)
        q, k, v = F.silu(convolved(module, inputs, states)).split([key_size, key_size, size], dim=1)
        q, k = (x.view(len(rows), module.num_key_heads, -1) for x in (q, k))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(heads // module.num_key_heads, dim=1) for x in (q, k))
        gate = -module.A_log.double().exp() * F.softplus(a + module.dt_bias.double())
        value = v.view(len(rows), heads, -1)
        parts = value, q * module.key_dim**-0.5, k, gate, b.sigmoid()
        outputs = normed(delta_rule(*parts, states.recurrent), module.norm.eps)
        outputs = outputs * module.norm.weight.double()
        return outputs.flatten(1) * F.silu(z)
    assert isinstance(module, Mamba2)
    heads, groups = module.num_heads, module.num_groups
    size, shared = heads * module.head_dim, groups * module.state_size
    z, inputs, steps = rows.split([size, size + 2 * shared, heads], dim=1)
    x, b, c = F.silu(convolved(module, inputs, states)).split([size, shared, shared], dim=1)
    x = x.view(len(rows), heads, -1)
    b, c = (
        each.view(len(rows), groups, -1).repeat_interleave(heads // groups, 1) for each in (b, c)
    )
    dt = F.softplus(steps + module.dt_bias.double()).clamp(*module.limits)
    gate = -module.A_log.double().exp() * dt
    outputs = state_space(dt[..., None] * x, b, c, gate, states.recurrent)
    outputs = (outputs + module.D.double()[:, None] * x).flatten(1)
    gates = F.silu(z)
    if module.norm is None:
        return outputs * gates
    rows = outputs if module.is_normed_first else outputs * gates
    rows = normed(rows.view(len(rows), groups, -1), module.norm.eps).flatten(1)
    rows = rows * module.norm.weight.double()
    return rows * gates if module.is_normed_first else rows


def normed(rows: torch.Tensor, eps: float) -> torch.Tensor:
    return rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()


def convolved(module: RecurrentMixer, rows: torch.Tensor, states: LayerStates) -> torch.Tensor:
    joined = torch.cat((states.inputs, rows))
    weight = module.conv.weight[:, 0].double()
    windows = joined.unfold(0, weight.shape[1], 1)  # [rows, C, k]
    output = (windows * weight).sum(-1)
    states.inputs.copy_(joined[len(rows) :])
    return output if module.conv.bias is None else output + module.conv.bias.double()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, DTYPES[0]) for name in SPECS]
    + [(name, dtype) for name in KINDS for dtype in DTYPES[1:]],
)
def test_mixers_are_recurrences_in_float64(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Decodes beside chunks within and across pieces; rows of no run, and other slots, are NaN."""
    torch.manual_seed(0)
    layer = Layer(SPECS[name], dtype, device)
    runs = [
        StateRun(0, 1, 9, 0, 5),
        StateRun(1, 71, 50, 2, 3),
        StateRun(71, 74, 62, 4, 1),
        StateRun(74, 75, 64, 6, 7),
        StateRun(75, 77, 0, 0, 8),
        StateRun(77, 82, 61, 4, 13, (9, 10, 12, 11)),
    ]
    projected = torch.full((85, layer.width), torch.nan, device=device, dtype=dtype)
    projected[:82] = torch.randn(82, layer.width).to(projected)
    for part in layer.states:
        part[9:] = torch.nan
    before = [part.clone() for part in layer.states]
    outputs = layer.mix(projected, runs)
    assert outputs.dtype == dtype
    others = [slot for slot in range(9) if slot not in (5, 3, 1, 7, 8)]
    for part, old in zip(layer.states, before, strict=True):
        if not len(part):
            continue
        torch.testing.assert_close(part[others], old[others], rtol=0, atol=0, equal_nan=True)
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for run in runs:
        states = LayerStates(
            *(part[run.source].double() if len(part) else part.double() for part in before)
        )
        start = run.start
        for end, slot in run.kept:
            expected = exact(layer.module, projected[start:end].double(), states)
            torch.testing.assert_close(outputs[start:end].double(), expected, **tolerance)
            for part, own in zip(layer.states, states, strict=True):
                if len(part):
                    torch.testing.assert_close(part[slot].double(), own, **tolerance)
            start = end


LENGTH = 140
CUTS = [[1, 30, 2, 68, 1, 1, 37], [99, 41]]
AT_64 = [[64, 64, 12], [64, 76]]


def cut(layer: Layer, projected: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the outputs of a request that is cut like this, and its states."""
    outputs, source, start = [], 0, 0
    for size in sizes:
        destination = 2 if source == 1 else 1
        other = StateRun(0, 1, 3, 0, 3)
        rows = torch.cat((projected[:1], projected[start : start + size]))
        run = StateRun(1, 1 + size, start, source, destination)
        outputs.append(layer.mix(rows, [other, run])[1:])
        source, start = destination, start + size
    assert start == LENGTH
    return [torch.cat(outputs), *(part[source].clone() for part in layer.states if len(part))]


@pytest.mark.parametrize("name", KINDS)
def test_cuts_change_nothing_beyond_rounding(name: str, device: torch.device) -> None:
    """And nothing at all at multiples of 64."""
    torch.manual_seed(1)
    layer = Layer(SPECS[name], torch.float32, device)
    projected = torch.randn(LENGTH, layer.width, device=device)
    whole = cut(layer, projected, [LENGTH])
    for sizes in CUTS:
        for part, expected in zip(cut(layer, projected, sizes), whole, strict=True):
            torch.testing.assert_close(part, expected, **NEAR)
    for sizes in AT_64:
        assert all(map(torch.equal, cut(layer, projected, sizes), whole))


def test_repeated_keys_lose_no_digits(device: torch.device) -> None:
    """Of a text that repeats one token: the system that a piece solves has no zeros."""
    torch.manual_seed(2)
    layer = Layer(SPECS["delta net"], torch.float32, device)
    row = torch.randn(1, layer.width, device=device)
    row[:, -4:] = -9.0  # they forget nothing
    row[:, -8:-4] = 9.0  # and correct all
    projected = row.repeat(PIECE, 1)
    states = LayerStates(*(part[0].double() for part in layer.states))
    expected = exact(layer.module, projected.double(), states)
    outputs = layer.mix(projected, [StateRun(0, PIECE, 0, 0, 1)])
    torch.testing.assert_close(outputs.double(), expected, **NEAR)
    torch.testing.assert_close(layer.states.recurrent[1].double(), states.recurrent, **NEAR)


@examples(30)
@given(
    lengths=st.lists(st.integers(1, 2) | st.integers(1, 200), min_size=1, max_size=6),
    most_kept=st.integers(1, 8),
    position=st.integers(0, 200),
    padding=st.integers(0, 9),
)
def test_pieces_end_at_multiples_of_64(
    lengths: list[int], most_kept: int, position: int, padding: int
) -> None:
    """Runs of up to `most_kept` rows keep the state after each row, and have no pieces."""
    ends = np.cumsum(lengths).tolist()
    runs = [
        StateRun(end - length, end, position, 0, end, tuple(range(end - length + 1, end)))
        if length <= most_kept
        else StateRun(end - length, end, position, 0, end)
        for length, end in zip(lengths, ends, strict=True)
    ]
    work = work_of(runs, ends[-1] + padding, torch.device("cpu"))
    listed = [tuple(run) for run in work.runs.tolist()]
    expected_runs = [(*run[:5], bool(run.earlier)) for run in runs]
    assert sorted(run for run in listed if run[1]) == expected_runs
    assert all(end - start <= 1 for start, end, *_ in listed[work.num_long_runs :])
    slots = [-1] * (ends[-1] + padding)
    for run, own in zip(runs, expected_runs, strict=True):
        assert {listed[i] for i in work.run_of_row[run.start : run.end].tolist()} == {own}
        for end, slot in run.kept:
            slots[end - 1] = slot
    assert work.slot_of_row.tolist() == slots
    for row, index in enumerate(work.run_of_row[ends[-1] :].tolist(), start=ends[-1]):
        assert not listed[index][0] <= row < listed[index][1]
    pieces = sorted(tuple(piece) for piece in work.pieces.tolist() if piece[1])
    expected = []
    for run in runs:
        if run.end - run.start > 1 and not run.earlier:
            rows = range(run.start, run.end)
            places = [(row, (run.position + row - run.start) // PIECE) for row in rows]
            for index in dict.fromkeys(piece for _, piece in places):
                own = [row for row, piece in places if piece == index]
                expected.append((own[0], len(own)))
    assert pieces == expected
