"""Divides a step's attention into lists of work items, which the host writes and one kernel runs.

A *tile* is some rows of one request: its decode, its drafts, or a slice of its chunk. An *item* is
a tile and a part of the keys that it sees. If the tiles would leave processors idle, or one has far
more keys than others, its keys are split into parts, with results that are merged afterwards.

There are two kinds of tiles, since a tensor core's product has at least 16 rows, and pays with 128.
The heads of a group are rows of one product, so that each key is read once for them:

    narrow  16 rows: a token or a few (decodes, drafts, the rest of a chunk)
    wide   128 rows: slices of chunks

A list's place and most items depend only on the step's number of rows, so a captured graph runs
any step of its size: it launches a few waves of programs, which divide narrow items among them.
Outside graphs, each item has a program, and an empty list is not launched.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

NARROW_ROWS, WIDE_ROWS = 16, 128
"""Rows of a product: rows of the tile times heads of a group."""

ITEM_FIELDS = 8
"""slot, first row, number of rows, position of the first row, first key, end key, scratch row of a
part's first row (-1 if the keys are not split), unused."""

COUNT_FIELDS = 4
"""Before the items: numbers of items and of merges; the rest is unused and keeps items aligned."""

MERGE_FIELDS = 4
"""first row, number of rows, scratch row of the first row in the first part, number of parts."""

_KEYS = 64
"""Each part of a tile, except the last, has a multiple of this many keys."""
_NARROW_AT_ONCE, _WIDE_AT_ONCE = 3, 1
"""Programs that a processor is kept busy with. Two wide ones fit where they load tiles, but keys
split for twice as many programs were slower for chunks of 512 tokens: by a quarter, on an H200."""
_MERGING_AT_ONCE = 4
"""Programs that merge on a processor."""
_LARGEST_WIDE_HEAD = 256
_MOST_WAVES = 4
"""Most waves of wide items for which tiles are split to fill the last wave, and of a graph's
programs."""
_PART_COST = 128
"""Cost of a part beside its keys, in keys: its results are written, read and merged."""
_SPARE_WIDE = 8
"""Chunks of a graph's step whose last tile may be partial."""


class TokenSpan(NamedTuple):
    """One request's rows of a step.

    Attributes:
        slot: its row of the device's block table.
        first_row: its first row in the step.
        position: position of the first row's token in the request.
    """

    slot: int
    first_row: int
    num_rows: int
    position: int


class ListCounts(NamedTuple):
    """Items and merges of a list, or programs of a head for them."""

    num_items: int
    num_merges: int


WorkCounts = tuple[ListCounts, ...]
"""Of each list of a step."""


class ListShape(NamedTuple):
    """Properties of a list of items that kernels need before the items are known.

    Attributes:
        product_rows: `NARROW_ROWS` or more, or `WIDE_ROWS`.
        tile_rows: most rows of a tile.
        merge_rows: rows that one program merges.
        part_keys: fewest keys of a part.
        wave: items that the device runs at once.
        most_waves: most waves of items from split tiles.
        merge_wave: merges that the device runs at once.
        num_items, num_merges: most that there can be.
    """

    product_rows: int
    tile_rows: int
    merge_rows: int
    part_keys: int
    wave: int
    most_waves: int
    merge_wave: int
    num_items: int
    num_merges: int

    @property
    def size(self) -> int:
        """Its number of int32 in a step's inputs."""
        return COUNT_FIELDS + ITEM_FIELDS * self.num_items + MERGE_FIELDS * self.num_merges

    @property
    def programs(self) -> ListCounts:
        """Programs of a head that run any step's list.

        Wide items have one each. Narrow ones have several for each place on the device, so that a
        short item's place is taken at once.
        """
        most_items = self.num_items if self.product_rows >= WIDE_ROWS else _MOST_WAVES * self.wave
        return ListCounts(min(self.num_items, most_items), min(self.num_merges, self.merge_wave))

    @property
    def scratch_rows(self) -> int:
        """Rows of results before merging."""
        return self.most_waves * self.wave * self.tile_rows


WorkShape = tuple[ListShape, ...]
"""The list of narrow items, and the list of wide ones if the step has any."""


@dataclass(frozen=True)
class Tiling:
    """How to divide a model's attention for a device.

    Args:
        num_heads: query heads.
        num_processors: streaming multiprocessors of the device.
        has_wide: see `has_wide_tiles`.
    """

    num_heads: int
    num_kv_heads: int
    num_processors: int
    has_wide: bool = True

    def shape(self, num_rows: int, *, has_chunks: bool) -> WorkShape:
        """Return the shape of steps of up to `num_rows` rows.

        Args:
            has_chunks: whether there are wide items, if this device has any. Without them, a step's
                chunks are cut into narrow ones, which is correct but slower.
        """
        group = self.num_heads // self.num_kv_heads
        narrow_rows = max(1, NARROW_ROWS // group)
        narrow_wave = -(-_NARROW_AT_ONCE * self.num_processors // self.num_kv_heads)
        merge_wave = -(-_MERGING_AT_ONCE * self.num_processors // self.num_heads)
        narrow = ListShape(
            product_rows=max(NARROW_ROWS, _power_of_two(group)),
            tile_rows=narrow_rows,
            merge_rows=1,
            part_keys=2 * _KEYS,
            wave=narrow_wave,
            most_waves=1,
            merge_wave=merge_wave,
            num_items=num_rows + narrow_wave,
            num_merges=min(num_rows, narrow_wave // 2 * narrow_rows),
        )
        wide_rows = WIDE_ROWS // group
        if not (has_chunks and self.has_wide) or wide_rows <= narrow_rows:
            return (narrow,)
        merge_rows = min(8, _power_of_two(wide_rows))
        wide_wave = -(-_WIDE_AT_ONCE * self.num_processors // self.num_kv_heads)
        wide = ListShape(
            product_rows=WIDE_ROWS,
            tile_rows=wide_rows,
            merge_rows=merge_rows,
            part_keys=8 * _KEYS,
            wave=wide_wave,
            most_waves=_MOST_WAVES,
            merge_wave=merge_wave,
            num_items=num_rows // wide_rows + _SPARE_WIDE + _MOST_WAVES * wide_wave,
            num_merges=min(num_rows, _MOST_WAVES * wide_wave // 2 * -(-wide_rows // merge_rows)),
        )
        return (narrow, wide)

    @property
    def narrow_rows(self) -> int:
        """Most rows of each request in a step that needs no wide items."""
        return self.shape(0, has_chunks=False)[0].tile_rows


def has_wide_tiles(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether wide tiles fit: into registers, and into a processor's shared memory."""
    return dtype != torch.float32 and head_dim <= _LARGEST_WIDE_HEAD


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


class WorkList(NamedTuple):
    """One list on the device.

    Attributes:
        programs: launched for each head.
        counts: int32 [COUNT_FIELDS], how many of the next are in use.
        items: int32 [num_items, ITEM_FIELDS], the items with the most keys first.
        merges: int32 [num_merges, MERGE_FIELDS].
    """

    shape: ListShape
    programs: ListCounts
    counts: torch.Tensor
    items: torch.Tensor
    merges: torch.Tensor


def section_size(shape: WorkShape) -> int:
    """Return the number of int32 that the lists take in a step's inputs."""
    return sum(part.size for part in shape)


def work_lists(
    section: torch.Tensor, shape: WorkShape, counts: WorkCounts | None = None
) -> tuple[WorkList, ...]:
    """Return the device's lists in a step's inputs: views of `section`, int32 [section_size].

    Args:
        counts: of the one step that kernels are launched for; None for a graph of all steps.
    """
    lists: list[WorkList] = []
    parts = torch.split(section, [part.size for part in shape])
    programs = counts or [part.programs for part in shape]
    for part, own, launched in zip(shape, parts, programs, strict=True):
        merges = COUNT_FIELDS + ITEM_FIELDS * part.num_items
        lists.append(
            WorkList(
                part,
                launched,
                own[:COUNT_FIELDS],
                own[COUNT_FIELDS:merges].view(-1, ITEM_FIELDS),
                own[merges:].view(-1, MERGE_FIELDS),
            )
        )
    return tuple(lists)


def written_counts(section: Int32s, shape: WorkShape) -> WorkCounts:
    """Return the counts that `write_work` wrote."""
    starts = accumulate((part.size for part in shape[:-1]), initial=0)
    return tuple(ListCounts(*section[start : start + 2].tolist()) for start in starts)


def write_work(
    section: Int32s, shape: WorkShape, spans: Sequence[TokenSpan], sliding_window: int | None
) -> None:
    """Write a step's items.

    Args:
        section: int32 [section_size], in the step's inputs in host memory.
        shape: for at least as many rows as the spans have together.
        sliding_window: the widest of any layer; None if a layer sees all keys. A layer with a
            narrower window skips more.
    """
    tiles = np.array(spans, dtype=np.int64).reshape(-1, len(TokenSpan._fields))
    narrow, *wide = shape
    if wide:
        tiles = _cut(tiles, wide[0].tile_rows)
        is_wide = _largest(tiles[:, 2], wide[0].num_items - wide[0].most_waves * wide[0].wave)
        is_wide &= tiles[:, 2] > narrow.tile_rows
        _write_list(section[narrow.size :], wide[0], tiles[is_wide], sliding_window)
        tiles = tiles[~is_wide]
    _write_list(section, narrow, _cut(tiles, narrow.tile_rows), sliding_window)


def _cut(tiles: Int64s, most_rows: int) -> Int64s:
    """Cut tiles [N, 4], as in `TokenSpan`, into tiles of at most `most_rows` rows."""
    slot, first_row, num_rows, position = tiles.T
    if not len(tiles) or num_rows.max() <= most_rows:
        return tiles
    tile, offset = _pieces(num_rows, most_rows)
    rows = np.minimum(num_rows[tile] - offset, most_rows)
    return np.stack([slot[tile], first_row[tile] + offset, rows, position[tile] + offset], axis=1)


def _pieces(lengths: Int64s, most: Int64s | int) -> tuple[Int64s, Int64s]:
    """Cut lengths [N] into pieces of at most `most`; return each piece's owner and its start."""
    counts = -(-lengths // most)
    owner = np.arange(len(lengths)).repeat(counts)
    index = np.arange(len(owner)) - (counts.cumsum() - counts)[owner]
    return owner, index * np.broadcast_to(most, lengths.shape)[owner]


def _largest(values: Int64s, count: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the `count` largest values."""
    chosen = np.zeros(len(values), dtype=bool)
    chosen[np.argsort(-values, kind="stable")[:count]] = True
    return chosen


def _write_list(
    section: Int32s, shape: ListShape, tiles: Int64s, sliding_window: int | None
) -> None:
    section[:COUNT_FIELDS] = 0
    if not len(tiles):
        return
    slot, first_row, num_rows, position = tiles.T
    end = position + num_rows
    first_key = np.zeros_like(end)
    if sliding_window is not None:
        first_key = np.maximum(0, position + 1 - sliding_window)
    part_keys = _part_keys(end - first_key, shape)
    tile, offset = _pieces(end - first_key, part_keys)  # [items], like the next arrays
    low = first_key[tile] + offset
    high = np.minimum(low + part_keys[tile], end[tile])
    is_part = (end - first_key > part_keys)[tile]
    scratch = np.where(is_part, (is_part.cumsum() - 1) * shape.tile_rows, -1)
    items = [slot[tile], first_row[tile], num_rows[tile], position[tile], low, high, scratch]
    # The longest items first, so that none starts when all others are done.
    order = np.argsort(low - high, kind="stable")
    section[0] = len(tile)
    rows = section[COUNT_FIELDS:][: ITEM_FIELDS * len(tile)].reshape(-1, ITEM_FIELDS)
    for field, values in enumerate(items):
        rows[:, field] = values[order]
    is_first = is_part & (offset == 0)
    if is_first.any():
        split = tile[is_first]
        counts = -(-(end - first_key)[split] // part_keys[split])
        merged = np.stack([first_row[split], num_rows[split], scratch[is_first], counts], axis=1)
        first = COUNT_FIELDS + ITEM_FIELDS * shape.num_items
        section[1] = _write_merges(section[first:], shape.merge_rows, merged)


def _part_keys(num_keys: Int64s, shape: ListShape) -> Int64s:
    """Choose the keys in a part of each tile so that all items end soonest.

    Split tiles have at most `most_waves * wave` parts together.
    """
    best, soonest = num_keys, np.inf
    for num_waves in range(1, shape.most_waves + 1):
        fair = num_keys * (num_waves * shape.wave) // num_keys.sum()
        counts = np.maximum(1, np.minimum(fair, num_keys // shape.part_keys))
        part_keys = -(-num_keys // counts)
        # Items start in the order of their lengths: each wave takes as long as its first.
        longest = np.sort(part_keys.repeat(counts))[:: -shape.wave].sum()
        time = longest + _PART_COST * counts.sum() / shape.wave
        if time < soonest:
            best, soonest = part_keys, time
    return np.where(best < num_keys, -(-best // _KEYS) * _KEYS, num_keys)


def _write_merges(section: Int32s, merge_rows: int, split: Int64s) -> int:
    """Write an entry for every `merge_rows` rows of the split tiles, [N, MERGE_FIELDS].

    Returns:
        Number of entries.
    """
    first_row, num_rows, scratch, counts = split.T
    tile, offset = _pieces(num_rows, merge_rows)
    entries = section[: MERGE_FIELDS * len(tile)].reshape(-1, MERGE_FIELDS)
    entries[:, 0] = first_row[tile] + offset
    entries[:, 1] = np.minimum(num_rows[tile] - offset, merge_rows)
    entries[:, 2] = scratch[tile] + offset
    entries[:, 3] = counts[tile]
    return len(tile)
