"""The device's block table, rewritten only where it changed."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from legato.gpu.device import Device

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_NOTHING = np.zeros(0, dtype=np.int32)


class BlockTable:
    """What the device's table holds: blocks of each request in token order, a row a slot.

    What is behind a request's last block is that of others, or 0.
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._rows: list[Int32s] = [_NOTHING] * num_slots  # as they are on the device

    def changes(self, rows: Sequence[tuple[int, Int32s]]) -> Int64s:
        """What has to change for the rows of a step's requests to hold their blocks.

        Args:
            rows: slot and int32 [blocks] of each; the same array is the same blocks.

        Returns:
            [2, count]: places in the table [slots, max blocks], and the blocks that belong there.
        """
        changed = [(slot, row) for slot, row in rows if row is not self._rows[slot]]
        places: list[npt.NDArray[np.int64]] = []
        values: list[Int32s] = []
        for slot, row in changed:
            columns = _differing(self._rows[slot], row)
            places.append(columns + slot * self._max_blocks)
            values.append(row[columns])
        return np.stack([_joined(places), _joined(values)])

    def note(self, rows: Sequence[tuple[int, Int32s]]) -> None:
        """They are on the device now."""
        for slot, row in rows:
            self._rows[slot] = row


def change_table(device: Device, table: torch.Tensor, changes: Int64s) -> None:
    """Have the device's table, int32 [slots, max blocks], be as `BlockTable.changes` has it."""
    if changes.size:
        places, blocks = device.upload(changes)
        table.view(-1).index_copy_(0, places, blocks.to(torch.int32))


def _joined(parts: Sequence[npt.NDArray[np.integer]]) -> Int64s:
    return np.concatenate([_NOTHING, *parts]).astype(np.int64)


def _differing(old: Int32s, new: Int32s) -> npt.NDArray[np.int64]:
    """Indices into `new` at which `old` has something else, or nothing."""
    common = min(len(old), len(new))
    changed = np.flatnonzero(old[:common] != new[:common])
    return np.concatenate([changed, np.arange(common, len(new))])
