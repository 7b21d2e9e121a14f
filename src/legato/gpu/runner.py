"""Steps as graphs: what they ask of the device is recorded once for each size, then replayed.

Asking for ten kernels a layer takes the host longer than a step of decodes takes the device.
"""

from collections.abc import Callable, Iterator
from functools import partial

from legato.core.rows import RowCounts
from legato.gpu.device import Device
from legato.gpu.step_inputs import StepSize
from legato.gpu.step_program import StepProgram

Replay = Callable[[], None]

_MOST_ROWS = 2048
"""Of a step from a graph. A larger one lasts longer than it takes the host to ask for it."""
_FEWEST_CHUNK_ROWS = 16
"""Rows below which a chunk is no more than narrow tiles."""


class GraphRunner:
    """A `Runner` that pads steps to a few sizes, for which it has graphs.

    The layers are a graph for each number of rows; the logits and then sampling are two for each
    number of sampled rows. So the numbers of graphs add up, where one a step would multiply them.
    A step of more rows than any graph has is asked for anew.

    Args:
        rows: numbers that rows and sampled rows are padded to.
        max_decodes: rows of the largest step without chunks, drafts among them.
    """

    def __init__(
        self, program: StepProgram, device: Device, rows: RowCounts, *, max_decodes: int
    ) -> None:
        self._program = program
        self._device = device
        self._rows = rows
        self._max_decodes = rows.padded(max_decodes)
        self._layers: dict[tuple[int, bool], Replay] = {}  # key rows, and whether there are chunks
        self._heads: dict[int, Replay] = {}  # key sampled rows, as of the next
        self._samples: dict[int, Replay] = {}

    def size(self, num_rows: int, num_samples: int, *, has_chunks: bool) -> StepSize:
        padded = self._rows.padded(num_rows)
        is_mixed = padded > self._max_decodes or (has_chunks and padded >= _FEWEST_CHUNK_ROWS)
        return StepSize(padded, self._rows.padded(num_samples), is_mixed)

    def forward(self, size: StepSize) -> None:
        layers = self._layers.get((size.num_rows, size.has_chunks))
        layers() if layers is not None else self._program.layers(size)
        head = self._heads.get(size.num_samples)
        head() if head is not None else self._program.head(size)

    def sample(self, size: StepSize) -> None:
        sample = self._samples.get(size.num_samples)
        sample() if sample is not None else self._program.sample(size)

    @property
    def largest(self) -> StepSize:
        """Of the steps that there are graphs for."""
        return self.size(
            min(self._program.max_rows, _MOST_ROWS), self._program.max_samples, has_chunks=True
        )

    def capture(self) -> None:
        """Have the graphs. The device computes each of them once; what comes of that is nothing."""
        program = self._program
        for size in self._sizes():
            key = size.num_rows, size.has_chunks
            self._layers[key] = self._graph(partial(program.layers, size))
        for count in reversed(self._rows.up_to(program.max_samples)):
            size = StepSize(1, count, has_chunks=False)
            self._heads[count] = self._graph(partial(program.head, size))
            self._samples[count] = self._graph(partial(program.sample, size))

    def _sizes(self) -> Iterator[StepSize]:
        """The largest first: the others share what memory it takes."""
        for num_rows in reversed(self._rows.up_to(self.largest.num_rows)):
            alone = self.size(num_rows, 0, has_chunks=False)
            mixed = self.size(num_rows, 0, has_chunks=True)
            yield from dict.fromkeys((mixed, alone))

    def _graph(self, work: Replay) -> Replay:
        work()  # its kernels are compiled and loaded, which cannot be recorded
        return self._device.capture(work)
