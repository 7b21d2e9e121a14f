"""Work items as a property: each row's keys are attended to once, in any step."""

from typing import NamedTuple

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from legato.gpu.work_items import (
    Tiling,
    TokenSpan,
    WorkList,
    WorkShape,
    section_size,
    work_lists,
    write_work,
    written_counts,
)
from tests.profiles import examples

LLAMA_8B = Tiling(num_heads=32, num_kv_heads=8, num_processors=132)


class _Part(NamedTuple):
    """An item, in the order of its fields."""

    slot: int
    first_row: int
    num_rows: int
    position: int
    low: int
    high: int
    scratch: int
    nothing: int


def _spans(rows: list[tuple[int, int]]) -> list[TokenSpan]:
    """Of requests with (rows, position of the first)."""
    spans: list[TokenSpan] = []
    first_row = 0
    for slot, (num_rows, position) in enumerate(rows):
        spans.append(TokenSpan(slot + 3, first_row, num_rows, position))
        first_row += num_rows
    return spans


def _written(
    shape: WorkShape, spans: list[TokenSpan], sliding_window: int | None = None
) -> tuple[WorkList, ...]:
    section = np.full(section_size(shape), -5, dtype=np.int32)
    write_work(section, shape, spans, sliding_window)
    counts = written_counts(section, shape)
    lists = work_lists(torch.from_numpy(section), shape, counts)
    return tuple(
        work._replace(items=work.items[:num_items], merges=work.merges[:num_merges])
        for work, (num_items, num_merges) in zip(lists, counts, strict=True)
    )


def _tiles(work: WorkList) -> dict[int, list[_Part]]:
    """Parts of each tile by their keys; key the tile's first row."""
    tiles: dict[int, list[_Part]] = {}
    for item in sorted(map(_Part._make, work.items.tolist())):
        tiles.setdefault(item.first_row, []).append(item)
    return tiles


@given(
    heads=st.sampled_from([(32, 8), (9, 3), (28, 4), (16, 16), (64, 2), (71, 1)]),
    num_processors=st.sampled_from([1, 8, 132]),
    rows=st.lists(
        st.tuples(
            st.one_of(st.just(1), st.integers(1, 6), st.integers(1, 700)),
            st.one_of(st.integers(0, 300), st.integers(0, 40_000)),
        ),
        min_size=1,
        max_size=40,
    ),
    has_chunks=st.booleans(),
    sliding_window=st.sampled_from([None, 1, 100, 4096]),
    num_padding=st.integers(0, 9),
)
@examples(60)
def test_every_row_sees_its_keys_once(
    heads: tuple[int, int],
    num_processors: int,
    rows: list[tuple[int, int]],
    has_chunks: bool,
    sliding_window: int | None,
    num_padding: int,
) -> None:
    spans = _spans(rows)
    num_rows = sum(span.num_rows for span in spans)
    shape = Tiling(*heads, num_processors).shape(num_rows + num_padding, has_chunks=has_chunks)
    seen = np.zeros(num_rows, dtype=int)
    for work in _written(shape, spans, sliding_window):
        tiles = _tiles(work)
        for first_row, parts in tiles.items():
            span = next(s for s in reversed(spans) if s.first_row <= first_row)
            offset, count = first_row - span.first_row, parts[0].num_rows
            assert count <= work.shape.tile_rows
            assert offset + count <= span.num_rows
            position = span.position + offset
            where = {(p.slot, p.num_rows, p.position) for p in parts}
            assert where == {(span.slot, count, position)}
            oldest = 0 if sliding_window is None else max(0, position + 1 - sliding_window)
            assert [p.low for p in parts] == [oldest, *(p.high for p in parts[:-1])]
            assert all(p.low < p.high for p in parts)
            assert parts[-1].high == position + count
            seen[first_row : first_row + count] += 1
        _check_merges(work, tiles)
        lengths = [high - low for *_, low, high, _, _ in work.items.tolist()]
        assert lengths == sorted(lengths, reverse=True)
    assert (seen == 1).all()


def _check_merges(work: WorkList, tiles: dict[int, list[_Part]]) -> None:
    """Parts lie apart in scratch memory, and each row of theirs is merged once."""
    places = [
        part.scratch + i for parts in tiles.values() for part in parts for i in range(part.num_rows)
        if part.scratch >= 0
    ]  # fmt: skip
    assert len(set(places)) == len(places)
    assert max(places, default=0) < work.shape.scratch_rows
    wanted: dict[int, tuple[int, int]] = {}  # key a row, value where its first part is, how many
    for first_row, parts in tiles.items():
        stride = work.shape.tile_rows if len(parts) > 1 else 0
        scratch = parts[0].scratch
        assert [part.scratch for part in parts] == [scratch + j * stride for j in range(len(parts))]
        assert (scratch < 0) == (len(parts) == 1)
        for i in range(parts[0].num_rows) if stride else ():
            wanted[first_row + i] = (scratch + i, len(parts))
    merged = [
        (first_row + i, (scratch + i, num_parts))
        for first_row, num_rows, scratch, num_parts in work.merges.tolist()
        for i in range(num_rows)
    ]
    assert sorted(merged) == sorted(wanted.items())
    assert all(count <= work.shape.merge_rows for _, count, _, _ in work.merges.tolist())


def _num_items(work: WorkList) -> int:
    return len(work.items)


def test_one_stream_is_split_over_the_device_and_many_are_not() -> None:
    shape = LLAMA_8B.shape(256, has_chunks=False)
    (one,) = _written(shape, _spans([(1, 8191)]))
    assert 0.8 * one.shape.wave < _num_items(one) <= one.shape.wave
    (many,) = _written(shape, _spans([(1, 1023)] * 256))
    assert _num_items(many) == 256
    (uneven,) = _written(shape, _spans([(1, 1023)] * 255 + [(1, 32_767)]))
    assert 256 < _num_items(uneven) <= 256 + uneven.shape.wave


def test_a_few_tiles_of_a_chunk_fill_whole_waves() -> None:
    for num_rows in (128, 256, 384, 512, 640):
        _, wide = _written(LLAMA_8B.shape(num_rows, has_chunks=True), _spans([(num_rows, 8192)]))
        num_waves = _num_items(wide) / (LLAMA_8B.num_processors / LLAMA_8B.num_kv_heads)
        assert num_waves / np.ceil(num_waves) > 0.85, num_rows


def test_a_step_of_more_chunks_than_a_graph_foresees_is_run_all_the_same() -> None:
    """The shortest are cut into narrow items."""
    spans = _spans([*[(20, 64)] * 100, (320, 0)])
    narrow, wide = map(_tiles, _written(LLAMA_8B.shape(2320, has_chunks=True), spans))
    assert sum(parts[0].num_rows for parts in [*narrow.values(), *wide.values()]) == 2320
    assert narrow
    assert set(range(2000, 2320, 32)) <= wide.keys()


def test_a_step_without_chunks_has_no_wide_items() -> None:
    assert len(LLAMA_8B.shape(256, has_chunks=False)) == 1
    assert LLAMA_8B.narrow_rows == 4
    (narrow,) = _written(LLAMA_8B.shape(64, has_chunks=False), _spans([(40, 3), (4, 9)]))
    assert [part[0].num_rows for part in _tiles(narrow).values()] == [4] * 11
