"""States of recurrent layers: what they keep of a request, however long it is.

A state lives in a slot. A step reads the state of each of its chunks from one slot and writes the
next one to another slot, so that a step that fails changes nothing.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch


class StateShape(NamedTuple):
    """What one layer keeps of a request.

    Attributes:
        num_inputs, num_channels: the last inputs of its convolution, in the model's dtype; a
            convolution over k positions keeps k - 1.
        recurrent: shape of its float32 state; empty if it has none.
    """

    num_inputs: int
    num_channels: int
    recurrent: tuple[int, ...] = ()

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of one state, for a model of `dtype`."""
        inputs = self.num_inputs * self.num_channels * dtype.itemsize
        values = math.prod(self.recurrent) if self.recurrent else 0
        return inputs + torch.float32.itemsize * values


class LayerStates(NamedTuple):
    """The states of one layer, in N slots.

    Attributes:
        inputs: [N, num_inputs, num_channels].
        recurrent: float32 [N, *recurrent]; empty if the layer has none.
    """

    inputs: torch.Tensor
    recurrent: torch.Tensor


class StateRun(NamedTuple):
    """One request's rows [start, end) of a step.

    Attributes:
        position: of its first token.
        source, destination: slots of the state before its rows, and after them.
        earlier: slots of the state after each row but the last; empty if these are not kept.
    """

    start: int
    end: int
    position: int
    source: int
    destination: int
    earlier: tuple[int, ...] = ()

    @property
    def kept(self) -> Iterator[tuple[int, int]]:
        """The ends of the rows after which the state is kept, each with its slot."""
        yield from enumerate(self.earlier, self.start + 1)
        yield self.end, self.destination


class StepStates:
    """The recurrent layers' states in one step, bound to the runs of its packed rows.

    Args:
        layers: of each recurrent layer.
        runs: adjacent, from row 0 on; rows after the last are padding. None reads a slot that
            one of them writes.
    """

    def __init__(self, layers: Sequence[LayerStates], runs: Sequence[StateRun]) -> None:
        self.layers = layers
        self.runs = runs
        self.num_rows = runs[-1].end
        self._device = layers[0].inputs.device
        # Key the inputs that a convolution keeps.
        self._places: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def convolve(
        self,
        layer: int,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Convolve each run causally, channel by channel, and keep its last inputs.

        Every row's sum has the same order, so results do not depend on how a request is cut.

        Args:
            layer: index among the recurrent layers.
            rows: [T, C], padding excluded.
            weight: [C, 1, k], the last for a row itself.

        Returns:
            float32 [T, C].
        """
        inputs = self.layers[layer].inputs
        num_inputs = inputs.shape[1]
        earlier, own, last = self._placed(num_inputs)
        # Each run's rows come after the inputs that its request keeps.
        joined = rows.new_empty(len(self.runs) * num_inputs + len(rows), rows.shape[1])
        joined[earlier.flatten()] = inputs[self._sources].flatten(0, 1)
        joined[own] = rows
        taps = weight[:, 0].float().t()  # [k, C]
        joined_float = joined.float()
        output = joined_float[own - num_inputs] * taps[0]
        for tap in range(1, num_inputs + 1):
            output += joined_float[own - num_inputs + tap] * taps[tap]
        inputs[self._kept_slots] = joined[last.flatten()].view(len(last), *inputs.shape[1:])
        return output if bias is None else output + bias.float()

    def padded(self, rows: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Append zeros [P - T, E] to rows [T, E], for rows that are padding."""
        if len(rows) == num_rows:
            return rows
        return torch.cat((rows, rows.new_zeros(num_rows - len(rows), rows.shape[1])))

    @cached_property
    def _sources(self) -> torch.Tensor:
        return self._index([run.source for run in self.runs])

    @cached_property
    def _kept_slots(self) -> torch.Tensor:
        return self._index([slot for run in self.runs for _, slot in run.kept])

    def _placed(self, num_inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return where kept inputs, rows and inputs to keep are when joined.

        Computed once a step, not once a layer.

        Returns:
            [R, k], [T] and [S, k], for R runs that keep S states.
        """
        if num_inputs not in self._places:
            starts = self._index([run.start for run in self.runs])
            ends = self._index([run.end for run in self.runs])
            before = num_inputs * torch.arange(len(self.runs), device=self._device)
            kept = torch.arange(num_inputs, device=self._device)
            row = torch.arange(self.num_rows, device=self._device)
            own = row + (before + num_inputs).repeat_interleave(ends - starts)
            first = starts + before
            kept_ends = [
                end + num_inputs * i for i, run in enumerate(self.runs) for end, _ in run.kept
            ]
            last = self._index(kept_ends)
            self._places[num_inputs] = first[:, None] + kept, own, last[:, None] + kept
        return self._places[num_inputs]

    def _index(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def make_states(
    shapes: Sequence[StateShape], num_slots: int, dtype: torch.dtype, device: torch.device
) -> list[LayerStates]:
    """Make the slots of each layer, filled with zeros; raises `MemoryError` as PyTorch does."""
    zeros = partial(torch.zeros, device=device)
    return [
        LayerStates(
            zeros((num_slots, shape.num_inputs, shape.num_channels), dtype=dtype),
            zeros((num_slots, *shape.recurrent) if shape.recurrent else (0,), dtype=torch.float32),
        )
        for shape in shapes
    ]
