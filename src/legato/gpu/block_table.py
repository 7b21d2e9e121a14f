"""The device's block table; only changed entries are rewritten."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from legato.gpu.device import Device

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_NOTHING = np.zeros(0, dtype=np.int32)


class DeviceBlockTable:
    """The host's copy of the device's table: blocks of each request in token order, a row a slot.

    Entries after a request's last block are left over from other requests, or 0.
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._rows: list[Int32s] = [_NOTHING] * num_slots  # as on the device

    def changes(self, rows: Sequence[tuple[int, Int32s]]) -> Int64s:
        """Return the changes after which the rows of a step's requests hold their blocks.

        Args:
            rows: slot and int32 [blocks] of each; the same array means the same blocks.

        Returns:
            [2, count]: indices in the table [slots, max blocks], and the blocks to write there.
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
        """Record that these rows are on the device."""
        for slot, row in rows:
            self._rows[slot] = row


def change_table(device: Device, table: torch.Tensor, changes: Int64s) -> None:
    """Apply `DeviceBlockTable.changes` to the device's table, int32 [slots, max blocks]."""
    if changes.size:
        places, blocks = device.upload(changes)
        table.view(-1).index_copy_(0, places, blocks.to(torch.int32))


def _joined(parts: Sequence[npt.NDArray[np.integer]]) -> Int64s:
    return np.concatenate([_NOTHING, *parts]).astype(np.int64)


def _differing(old: Int32s, new: Int32s) -> npt.NDArray[np.int64]:
    """Return the indices into `new` at which `old` differs or has ended."""
    common = min(len(old), len(new))
    changed = np.flatnonzero(old[:common] != new[:common])
    return np.concatenate([changed, np.arange(common, len(new))])
