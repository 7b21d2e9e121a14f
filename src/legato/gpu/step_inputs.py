"""A step's inputs from the host: one array of int32, which one copy moves to the device.

The place of each section depends only on the step's size, so a captured graph finds its inputs. The
sections of sampled rows have fixed places, so that their graphs serve any number of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat, starmap
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from legato.executor.batch import FlatChunks, FlatRows, token_ids
from legato.executor.sequences import BegunStep
from legato.executor.state_cache import OUTSIDE
from legato.gpu.block_table import Int32s, Int64s
from legato.gpu.device import Device
from legato.gpu.sampler import NUM_WORDS, SamplingInputs, SamplingTable
from legato.gpu.state_work import StateWork, StateWorkShape
from legato.gpu.work_items import (
    Tiling,
    TokenSpan,
    WorkCounts,
    WorkList,
    WorkShape,
    section_size,
    work_lists,
    written_counts,
)
from legato.model.states import StateRun


class StepSize(NamedTuple):
    """The size at which a step is computed; a graph is captured for one size.

    Attributes:
        num_rows: P rows; the last may be padding.
        num_samples: Q sampled rows; the last may be padding.
        has_chunks: whether attention has wide items, and recurrent layers runs of several rows.
    """

    num_rows: int
    num_samples: int
    has_chunks: bool


class LoadedStep(NamedTuple):
    """A step whose inputs are on the device, or on their way there.

    Attributes:
        work_counts: of each cache group; kernels outside graphs are launched for them.
    """

    size: StepSize
    work_counts: tuple[WorkCounts, ...]


class GroupInputs(NamedTuple):
    """What the layers of a cache group read.

    Attributes:
        slot_mapping: int32 [P], slot of each row's key and value: block id * block size + offset;
            -1 for rows that are not written.
        work: attention's items.
    """

    slot_mapping: torch.Tensor
    work: tuple[WorkList, ...]


class Sections(NamedTuple):
    """The sections of a step's inputs, as the host writes them or the device reads them.

    Attributes:
        mappings, work: one for each cache group.
    """

    sampling: Any
    sample_rows: Any
    sample_slots: Any
    input_source: Any
    positions: Any
    mappings: Sequence[Any]
    states: Any
    work: Sequence[Any]


@dataclass(frozen=True)
class StepInputs:
    """Views of a step's inputs, int32, on the device.

    Attributes:
        sampling: settings of each sampled row.
        sample_rows: [Q], rows of the step.
        sample_slots: [Q], index in `last_token` of the sampled token; the padding slot for padding
            and for all rows of a chunk but its last. After drafts, the token there is not read: the
            host knows all tokens before it plans the next step.
        input_source: [P], a token id, or -1 - slot for the token at `last_token[slot]`.
        positions: [P], position of each token within its request.
        groups: of each cache group.
        states: runs for recurrent layers; None if there are no such layers.
    """

    sampling: SamplingInputs
    sample_rows: torch.Tensor
    sample_slots: torch.Tensor
    input_source: torch.Tensor
    positions: torch.Tensor
    groups: tuple[GroupInputs, ...]
    states: StateWork | None = None


@dataclass(frozen=True)
class Layout:
    """The place of each section in the inputs of a step of one size.

    Attributes:
        max_samples: Q of the largest step.
        work_shapes: of each cache group.
        state_shape: None if there are no recurrent layers.
    """

    size: StepSize
    max_samples: int
    work_shapes: tuple[WorkShape, ...]
    state_shape: StateWorkShape | None

    @classmethod
    def of(
        cls,
        size: StepSize,
        tilings: Sequence[Tiling],
        max_samples: int,
        max_runs: int | None = None,
    ) -> "Layout":
        """Return the layout of steps of a size.

        Args:
            tilings: of each cache group.
            max_runs: of a step, for recurrent layers; None if there are no such layers.
        """
        shapes = tuple(
            tiling.shape(size.num_rows, has_chunks=size.has_chunks) for tiling in tilings
        )
        state_shape: StateWorkShape | None = None
        if max_runs is not None:
            state_shape = StateWorkShape.of(size.num_rows, max_runs, has_chunks=size.has_chunks)
        return cls(size, max_samples, shapes, state_shape)

    @property
    def num_words(self) -> int:
        return sum(self._section_sizes)

    def loaded(self, words: Int32s) -> LoadedStep:
        """Return what the host must know of a step whose inputs are `words`."""
        work = zip(self.sections(words).work, self.work_shapes, strict=True)
        return LoadedStep(self.size, tuple(starmap(written_counts, work)))

    def views(
        self, words: torch.Tensor, work_counts: Sequence[WorkCounts] | None = None
    ) -> StepInputs:
        """Return the sections of `words`, int32 [at least num_words], as the device reads them.

        Args:
            work_counts: of each group, in the one step to compute; None for a graph of all steps.
        """
        parts = self.sections(words)
        counts = repeat(None) if work_counts is None else work_counts
        work = map(work_lists, parts.work, self.work_shapes, counts)
        return StepInputs(
            SamplingInputs.of(parts.sampling),
            parts.sample_rows,
            parts.sample_slots,
            parts.input_source,
            parts.positions,
            tuple(map(GroupInputs, parts.mappings, work)),
            None if self.state_shape is None else self.state_shape.views(parts.states),
        )

    def sections(self, words: Int32s | torch.Tensor) -> Sections:
        """Return views of `words`: to write, of the host's array, or to read, of the device's."""
        bounds = pairwise(accumulate(self._section_sizes, initial=0))
        parts = [
            words[first:end][used] for (first, end), used in zip(bounds, self._used, strict=True)
        ]
        sampling, rows, slots, source, positions, *rest = parts
        count = len(self.work_shapes)
        return Sections(
            sampling, rows, slots, source, positions, rest[:count], rest[count], rest[count + 1 :]
        )

    @property
    def _section_sizes(self) -> list[int]:
        # Sections with numbers of 8 bytes come first.
        num_row_sections = 2 + len(self.work_shapes)
        samples = [_aligned(self.max_samples)] * 2
        rows = [_aligned(self.size.num_rows)] * num_row_sections
        states = _aligned(self._num_state_words)
        return [
            NUM_WORDS * self.max_samples,
            *samples,
            *rows,
            states,
            *map(section_size, self.work_shapes),
        ]

    @property
    def _used(self) -> list[slice]:
        """The used part of each section. An empty one could not be viewed as numbers of 8 bytes."""
        num_rows, num_samples, _ = self.size
        words, samples = slice(NUM_WORDS * max(1, num_samples)), slice(num_samples)
        states = slice(self._num_state_words)
        num_groups = len(self.work_shapes)
        rows = [slice(num_rows)] * (2 + num_groups)
        return [words, samples, samples, *rows, states, *[slice(None)] * num_groups]

    @property
    def _num_state_words(self) -> int:
        return 0 if self.state_shape is None else sum(self.state_shape.sizes)


class StepRows:
    """The rows of a step, chunk by chunk, before they are written to its inputs.

    Args:
        slots: rows of the chunks' requests in the device's tables.
        block_rows: for each cache group, int32 [blocks] of each chunk's request.
    """

    def __init__(
        self,
        step: BegunStep,
        slots: Sequence[int],
        block_rows: Sequence[Sequence[Int32s]],
        *,
        block_size: int,
    ) -> None:
        self._step = step
        self._slots = np.array(slots, dtype=np.int32)
        self._block_rows = block_rows
        self._block_size = block_size
        self._flat = FlatChunks.of(step.plan.chunks)

    @property
    def firsts(self) -> Int64s:
        """Row of each chunk's first token."""
        return self._flat.firsts

    @property
    def longest(self) -> int:
        """Rows of the longest chunk."""
        return int(self._flat.counts.max())

    @property
    def spans(self) -> list[TokenSpan]:
        columns = self._slots, self._flat.firsts, self._flat.counts, self._flat.starts
        return list(map(TokenSpan, *(column.tolist() for column in columns)))

    @property
    def runs(self) -> list[StateRun]:
        """The chunks as runs."""
        firsts, starts, counts, _ = (column.tolist() for column in self._flat)
        return [
            StateRun(first, first + count, start, *(chunk.state or OUTSIDE))
            for chunk, first, start, count in zip(
                self._step.plan.chunks, firsts, starts, counts, strict=True
            )
        ]

    def write(self, sections: Sections, sampling: SamplingTable, *, padding_slot: int) -> None:
        """Write all sections except those of runs and of attention's items.

        Args:
            sections: from `Layout.sections`.
            sampling: settings of the requests in the slots.
            padding_slot: the slot of rows that sample nothing.
        """
        rows = self._flat.rows()
        _fill(sections.positions, rows.position, 0)
        for mapping, block_rows in zip(sections.mappings, self._block_rows, strict=True):
            _fill(mapping, self._places(rows, block_rows), -1)
        _fill(sections.input_source, self._sources(), 0)
        sampled = self._flat.sampled(rows)
        whose = self._slots[rows.chunk[sampled]]
        _fill(sections.sample_rows, sampled, 0)
        slots = np.where(rows.num_left[sampled] == 1, whose, padding_slot)
        _fill(sections.sample_slots, slots, padding_slot)
        num_prompt_tokens = np.array([s.num_prompt_tokens for s in self._step.sequences])
        num_output_tokens = rows.position[sampled] + 1 - num_prompt_tokens[rows.chunk[sampled]]
        sampling.write(sections.sampling, whose, num_output_tokens)

    def _places(self, rows: FlatRows, block_rows: Sequence[Int32s]) -> Int64s:
        """Return the cache slot of each row's key and value in a group."""
        starts, counts = self._flat.starts, self._flat.counts
        first_blocks = starts // self._block_size
        end_blocks = -(-(starts + counts) // self._block_size)
        blocks = np.concatenate(
            [
                row[first:end]
                for row, first, end in zip(
                    block_rows, first_blocks.tolist(), end_blocks.tolist(), strict=True
                )
            ]
        )
        num_blocks = end_blocks - first_blocks
        block, offset = np.divmod(rows.position, self._block_size)
        place = (num_blocks.cumsum() - num_blocks - first_blocks)[rows.chunk] + block
        places: Int64s = blocks[place].astype(np.int64) * self._block_size + offset
        return places

    def _sources(self) -> Int64s:
        """Return each row's token, or -1 - slot for a token that the step in flight samples."""
        sources = token_ids(self._step.plan.chunks, self._step.sequences)
        num_drafts = np.array([len(chunk.draft_token_ids) for chunk, _ in self._step.pairs])
        known = np.array([sequence.num_tokens for sequence in self._step.sequences])
        ends = self._flat.starts + self._flat.counts - num_drafts
        unknown = ends > known
        # Only the last token before drafts can be unknown: no plan goes beyond it but by drafts.
        rows = self._flat.firsts + self._flat.counts - 1 - num_drafts
        sources[rows[unknown]] = -1 - self._slots[unknown]
        return sources


class HostStep(NamedTuple):
    """A step's inputs from the host to the device.

    Attributes:
        words: int32, laid out by `Layout`.
        table_changes: from `BlockTable.changes`.
    """

    size: StepSize
    words: Int32s
    table_changes: Int64s


class StagedInputs:
    """Host memory for steps; that of earlier steps may still be copied to the device."""

    def __init__(self, device: Device, num_words: int, count: int) -> None:
        self._words = [device.host_tensor(num_words, dtype=torch.int32) for _ in range(count)]
        self._copied = [device.event() for _ in range(count)]
        self._turn = 0

    def next(self) -> Int32s:
        """Return int32 [num_words] that is not being copied; `copy` then copies it."""
        self._turn = (self._turn + 1) % len(self._words)
        self._copied[self._turn].wait()
        words: Int32s = self._words[self._turn].numpy()
        return words

    def copy(self, words: torch.Tensor, count: int) -> None:
        """Start copying the first `count` numbers to `words` on the device."""
        words[:count].copy_(self._words[self._turn][:count], non_blocking=True)
        self._copied[self._turn].record()


def _aligned(num_words: int) -> int:
    """Round up to a multiple of 16 bytes: Triton compiles anew for an unaligned pointer."""
    return -(-num_words // 4) * 4


def _fill(section: Int32s, values: npt.NDArray[np.integer], padding: int) -> None:
    section[: len(values)] = values
    section[len(values) :] = padding
