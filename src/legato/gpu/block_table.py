"""The device's block table, rewritten only where it changed."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from legato.gpu.device import Device

Int32s = npt.NDArray[np.int32]

_NOTHING = np.zeros(0, dtype=np.int32)


class BlockTable:
    """Blocks of each request in token order, a row a slot.

    Args:
        table: int32 [slots, max blocks] on the device. What is behind a request's last block is
            that of others, or 0.
    """

    def __init__(self, device: Device, table: torch.Tensor) -> None:
        self._device = device
        self._table = table
        self._rows: list[Int32s] = [_NOTHING] * len(table)  # as they are on the device

    def update(self, rows: Iterable[tuple[int, Int32s]]) -> None:
        """Have the rows of a step's requests hold their blocks, for what is computed next.

        Args:
            rows: slot and int32 [blocks] of each; the same array is the same blocks.
        """
        changed = [(slot, row) for slot, row in rows if row is not self._rows[slot]]
        places: list[npt.NDArray[np.int64]] = []
        values: list[Int32s] = []
        for slot, row in changed:
            columns = _differing(self._rows[slot], row)
            places.append(columns + slot * self._table.shape[1])
            values.append(row[columns])
        if not changed:
            return
        both = self._device.upload(np.stack([np.concatenate(places), np.concatenate(values)]))
        self._table.view(-1).index_copy_(0, both[0], both[1].to(torch.int32))
        for slot, row in changed:
            self._rows[slot] = row


def _differing(old: Int32s, new: Int32s) -> npt.NDArray[np.int64]:
    """Indices into `new` at which `old` has something else, or nothing."""
    common = min(len(old), len(new))
    changed = np.flatnonzero(old[:common] != new[:common])
    return np.concatenate([changed, np.arange(common, len(new))])
