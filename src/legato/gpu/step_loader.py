"""Loads the next step's inputs and table changes into the device."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from legato.core.plan import ScheduledChunk
from legato.executor.sequence import SequenceState
from legato.executor.sequences import BegunStep
from legato.gpu.block_table import DeviceBlockTable, change_table
from legato.gpu.device import Device
from legato.gpu.sampler import SamplingTable
from legato.gpu.slots import Slots
from legato.gpu.step_inputs import HostStep, LoadedStep, StagedInputs, StepRows
from legato.gpu.step_program import Runner, StepProgram
from legato.gpu.work_items import write_work


class StepLoader:
    """The host's view of the device's tables, and the memory that inputs are copied from.

    Args:
        depth: steps that may be in flight, including the step being loaded.
        tell: called with each step; it may read the step's arrays only until it returns.
    """

    def __init__(
        self,
        program: StepProgram,
        device: Device,
        *,
        depth: int = 1,
        tell: Callable[[HostStep], None] | None = None,
    ) -> None:
        self._program = program
        self._device = device
        self._tell = tell
        self._slots = Slots(program.num_slots)
        self._holders: list[SequenceState | None] = [None] * program.num_slots
        self._settings = SamplingTable(program.num_slots)
        num_groups, num_slots, max_blocks = program.block_table.shape
        self._block_table = DeviceBlockTable(num_groups * num_slots, max_blocks)
        self._staged = StagedInputs(device, program.max_words, depth + 1)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Release the slots of ended requests."""
        self._slots.drop(request_ids)

    def load(self, step: BegunStep, runner: Runner) -> tuple[LoadedStep, npt.NDArray[np.int64]]:
        """Copy a step to the device, after the work launched before.

        Args:
            runner: chooses the size at which it is computed.

        Returns:
            The step, and the row of each chunk's first token.
        """
        program = self._program
        slots = self._slots.take([chunk.request_id for chunk in step.plan.chunks])
        self._introduce(slots, step.sequences)
        block_rows = [
            [_block_row(group, chunk, sequence) for chunk, sequence in step.pairs]
            for group in range(len(program.groups))
        ]
        rows = StepRows(step, slots, block_rows, block_size=program.block_size)
        has_chunks = rows.longest > program.most_rows_without_chunks
        size = runner.size(step.plan.num_tokens, step.num_samples, has_chunks=has_chunks)
        assert size.num_rows <= program.max_rows, "more tokens than a step may have"
        assert size.num_samples <= program.max_samples, "more samples than a step may have"
        layout, words = program.layout(size), self._staged.next()
        sections = layout.sections(words)
        rows.write(sections, self._settings, padding_slot=program.num_slots)
        if layout.state_shape is not None:
            layout.state_shape.write(sections.states, rows.runs)
        spans = rows.spans
        for work, shape, group in zip(
            sections.work, layout.work_shapes, program.groups, strict=True
        ):
            write_work(work, shape, spans, group.window)
        num_slots = program.block_table.shape[1]
        table_rows = [
            (group * num_slots + slot, row)
            for group, own_rows in enumerate(block_rows)
            for slot, row in zip(slots, own_rows, strict=True)
        ]
        changes = self._block_table.changes(table_rows)
        if self._tell is not None:
            self._tell(HostStep(size, words[: layout.num_words], changes))
        change_table(self._device, program.block_table, changes)
        self._block_table.note(table_rows)
        self._staged.copy(program.words, layout.num_words)
        return layout.loaded(words), rows.firsts

    def _introduce(self, slots: Sequence[int], sequences: Sequence[SequenceState]) -> None:
        for slot, sequence in zip(slots, sequences, strict=True):
            if self._holders[slot] is not sequence:
                self._settings.put(slot, sequence.message.params)
                self._holders[slot] = sequence


def _block_row(group: int, chunk: ScheduledChunk, sequence: SequenceState) -> npt.NDArray[np.int32]:
    """Return a request's blocks in a cache group; group 0 is no window group."""
    if group == 0:
        return sequence.block_row(chunk.block_ids)
    return sequence.window_row(group - 1, chunk.window_block_ids[group - 1])
