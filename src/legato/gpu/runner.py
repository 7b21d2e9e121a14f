"""Runs steps as graphs: each size is recorded once, then replayed.

Launching ten kernels a layer takes the host longer than a step of decodes takes the device.
"""

from collections.abc import Callable, Iterator
from functools import partial

from legato.core.rows import RowCounts
from legato.gpu.device import Device
from legato.gpu.step_inputs import LoadedStep, StepSize
from legato.gpu.step_program import StepProgram

Replay = Callable[[], None]

_MOST_ROWS = 2048
"""Most rows of a recorded step. A larger step takes longer than the host needs to launch it."""
_FEWEST_CHUNK_ROWS = 16
"""A step of fewer rows needs no wide tiles, even with chunks. Recurrent layers need to know of them
in steps of any size."""


class GraphRunner:
    """A `Runner` that pads steps to a few sizes and has graphs of these.

    There is a graph of the layers for each number of rows, and two graphs, of the logits and of
    sampling, for each number of sampled rows. So the numbers of graphs add up; with a single graph
    for a step they would multiply. A step of more rows than any graph has is launched kernel by
    kernel.

    Args:
        rows: row counts to which rows and sampled rows are padded.
        max_decodes: rows of the largest step without chunks, drafts included.
    """

    def __init__(
        self, program: StepProgram, device: Device, rows: RowCounts, *, max_decodes: int
    ) -> None:
        self._program = program
        self._device = device
        self._rows = rows
        self._max_decodes = rows.padded(max_decodes)
        self._layers: dict[tuple[int, bool], Replay] = {}  # key rows, and whether there are chunks
        self._heads: dict[int, Replay] = {}  # key sampled rows, as in the next
        self._samples: dict[int, Replay] = {}

    def size(self, num_rows: int, num_samples: int, *, has_chunks: bool) -> StepSize:
        padded = self._rows.padded(num_rows)
        fewest = _FEWEST_CHUNK_ROWS if self._program.states is None else 1
        is_mixed = padded > self._max_decodes or (has_chunks and padded >= fewest)
        return StepSize(padded, self._rows.padded(num_samples), is_mixed)

    def forward(self, step: LoadedStep) -> None:
        size = step.size
        layers = self._layers.get((size.num_rows, size.has_chunks))
        layers() if layers is not None else self._program.layers(*step)
        head = self._heads.get(size.num_samples)
        head() if head is not None else self._program.head(size)

    def sample(self, size: StepSize) -> None:
        sample = self._samples.get(size.num_samples)
        sample() if sample is not None else self._program.sample(size)

    @property
    def largest(self) -> StepSize:
        """Size of the largest step with a graph."""
        return self.size(
            min(self._program.max_rows, _MOST_ROWS), self._program.max_samples, has_chunks=True
        )

    def capture(self) -> None:
        """Record all graphs. The device runs each once, with results that are not used."""
        program = self._program
        for size in self._sizes():
            key = size.num_rows, size.has_chunks
            self._layers[key] = self._graph(partial(program.layers, size))
        for count in reversed(self._rows.up_to(program.max_samples)):
            size = StepSize(1, count, has_chunks=False)
            self._heads[count] = self._graph(partial(program.head, size))
            self._samples[count] = self._graph(partial(program.sample, size))

    def larger(self) -> Iterator[StepSize]:
        """Yield the sizes of steps without a graph."""
        for num_rows in self._rows.up_to(self._program.max_rows):
            if num_rows > self.largest.num_rows:
                yield self.size(num_rows, 0, has_chunks=True)

    def _sizes(self) -> Iterator[StepSize]:
        """Yield the largest size first: smaller ones share its memory."""
        for num_rows in reversed(self._rows.up_to(self.largest.num_rows)):
            alone = self.size(num_rows, 0, has_chunks=False)
            mixed = self.size(num_rows, 0, has_chunks=True)
            yield from dict.fromkeys((mixed, alone))

    def _graph(self, work: Replay) -> Replay:
        work()  # compiles and loads its kernels, which cannot be recorded
        return self._device.capture(work)
