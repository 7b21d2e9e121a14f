"""Graphs: which steps have one, and that a replay is the step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.core.config import SchedulerConfig
from legato.core.request import AddRequest
from legato.core.rows import GPU_ROWS, RowCounts
from legato.gpu import runner
from legato.gpu.gpu_executor import GpuExecutor
from legato.gpu.runner import GraphRunner
from legato.gpu.step_inputs import LoadedStep, StepSize
from legato.gpu.step_program import StepProgram
from legato.gpu.warm_up import warm_up
from tests.gpu.executors import Engine, device_here, make_executor, request
from tests.model.random_models import decoder_spec, random_decoder
from tests.profiles import examples
from tests.scheduler.foretold import Foretold, token_in

ROWS = RowCounts(((4, 2),), 8)
BLOCKS = {"block_size": 4, "num_blocks": 24}
BUDGET, MAX_DECODES = 12, 3
NARROW = 4
"""Rows of a narrow tile of a model with four heads in a group."""


class Sized:
    """As much of a program as says which graphs there are."""

    states = None

    def __init__(self, max_rows: int, max_samples: int) -> None:
        self.max_rows, self.max_samples = max_rows, max_samples
        self.asked: list[tuple[str, StepSize]] = []

    def __getattr__(self, part: str) -> Callable[..., None]:
        return lambda size, *_: self.asked.append((part, size))


class Recorder:
    """A device whose graphs say what they are of."""

    def __init__(self) -> None:
        self.num_captured = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG002
        self.num_captured += 1
        return lambda: None


@examples(200)
@given(
    num_rows=st.integers(1, 8448),
    num_samples=st.integers(0, 256),
    has_chunks=st.booleans(),
    max_decodes=st.sampled_from([1, 16, 256]),
)
def test_steps_are_padded_to_what_was_captured(
    num_rows: int, num_samples: int, has_chunks: bool, max_decodes: int
) -> None:
    program: Any = Sized(GPU_ROWS.padded(8448), GPU_ROWS.padded(max_decodes))
    device: Any = Recorder()
    graphs = GraphRunner(program, device, GPU_ROWS, max_decodes=max_decodes)
    graphs.capture()
    program.asked.clear()
    num_captured = device.num_captured
    num_samples = min(num_samples, num_rows, max_decodes)
    size = graphs.size(num_rows, num_samples, has_chunks=has_chunks)
    graphs.forward(LoadedStep(size, ()))
    graphs.sample(size)
    # A step without samples asks for a part that does nothing.
    asked = [part for part, of in program.asked if part == "layers" or of.num_samples]
    assert asked == ([] if num_rows <= 2048 else ["layers"])
    assert device.num_captured == num_captured <= 70
    assert num_rows <= size.num_rows <= max(1.5 * num_rows, 1.0625 * num_rows + 127, 16)
    assert num_samples <= size.num_samples <= program.max_samples
    assert size.has_chunks or not has_chunks or num_rows <= 8


@examples(200)
@given(
    rows=st.lists(st.integers(1, 17), min_size=1, max_size=256),
    max_num_seqs=st.sampled_from([1, 16, 256]),
)
def test_steps_with_drafts_have_graphs(rows: list[int], max_num_seqs: int) -> None:
    """Those of a few rows each without wide items, as long as they are no more than sampled rows.

    Args:
        rows: of each stream, its drafts among them.
    """
    most = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192).most_samples
    rows = rows[:max_num_seqs]
    while sum(rows) > most:
        rows[rows.index(max(rows))] -= 1
    program: Any = Sized(GPU_ROWS.padded(8448), GPU_ROWS.padded(most))
    device: Any = Recorder()
    graphs = GraphRunner(program, device, GPU_ROWS, max_decodes=most)
    graphs.capture()
    program.asked.clear()
    is_long = max(rows) > NARROW
    size = graphs.size(sum(rows), sum(rows), has_chunks=is_long)
    graphs.forward(LoadedStep(size, ()))
    graphs.sample(size)
    assert not program.asked
    assert size.has_chunks is (is_long and size.num_rows >= 16)
    assert device.num_captured <= 80


def requests() -> list[AddRequest]:
    return [
        request("a", [5, 20, 45, 80, 1, 2, 3, 4, 6, 9, 11, 13, 17, 19], max_tokens=4),
        request("b", [7], temperature=1.0, seed=3, top_p=0.9, max_tokens=5),
        request("c", [5, 20, 45, 80, 9], max_tokens=3, presence_penalty=1.0),
    ]


def test_replayed_steps_are_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes, chunks, both and drafts, some larger than any graph, two in flight.

    The second layer has experts, and each step picks others.
    """
    plain = random_decoder(decoder_spec(experts={"num_experts": 3}), torch.float32)
    settings = {**BLOCKS, "max_num_batched_tokens": BUDGET, "max_num_seqs": MAX_DECODES}
    anew, _ = make_executor(plain, **BLOCKS, depth=1)
    expected = Engine(anew, **settings).run(requests())

    monkeypatch.setattr(runner, "_MOST_ROWS", 8)
    device = device_here()
    _, program = make_executor(plain, **BLOCKS, device=device, max_rows=24)
    graphs = GraphRunner(program, device, ROWS, max_decodes=MAX_DECODES)
    with monkeypatch.context() as noting:
        warmed = note_sizes(program, noting)
        warm_up(program, graphs, device)
    assert 16 in {size.num_rows for size in warmed}, "a step without a graph meets its size anew"
    assert not program.blocks[0][:, :, 0].count_nonzero(), "what was computed of nothing is left"
    program.blocks[0].fill_(torch.nan)
    sizes = note_sizes(program, monkeypatch)
    monkeypatch.setattr(device, "capture", None)
    engine = Engine(GpuExecutor(program, device, graphs, depth=2), **settings)
    assert engine.run(requests()) == expected
    assert {size.num_rows for size in sizes} == {16}

    rows = {
        one.request_id: [*one.prompt_token_ids, *expected[one.request_id]] for one in requests()
    }
    drafter = Foretold(token_in(rows), lambda _, position: position % 3 > 0)
    executor = GpuExecutor(program, device, graphs, depth=2)
    program.blocks[0].fill_(torch.nan)
    engine = Engine(executor, **settings, drafters=[drafter], speculative=2)
    engine.set_recording(is_on=True)
    assert engine.run(requests()) == expected
    assert any(getattr(record, "num_accepted_tokens", 0) for record in engine.take_records())


def note_sizes(program: StepProgram, monkeypatch: pytest.MonkeyPatch) -> list[StepSize]:
    """Of steps that are asked for anew, from here on."""
    sizes: list[StepSize] = []
    layers = program.layers

    def noted(size: StepSize, *counts: Any, **options: Any) -> None:
        sizes.append(size)
        layers(size, *counts, **options)

    monkeypatch.setattr(program, "layers", noted)
    return sizes
