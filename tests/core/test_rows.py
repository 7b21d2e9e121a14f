"""The numbers of rows that batches are padded to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legato.core.rows import CPU_ROWS, GPU_ROWS, UNPADDED, RowCounts

MOST = 5000


@pytest.mark.parametrize("rows", [CPU_ROWS, GPU_ROWS, UNPADDED])
@given(num_rows=st.integers(0, MOST))
def test_a_batch_lies_between_two_neighbours_of_the_list(rows: RowCounts, num_rows: int) -> None:
    counts = [0, *rows.up_to(MOST)]
    assert rows.padded(num_rows) == min(count for count in counts if count >= num_rows)
    assert rows.full(num_rows) == max(count for count in counts if count <= num_rows)


def test_decodes_on_a_gpu_are_padded_by_a_third_at_most_and_chunks_by_a_tile() -> None:
    assert GPU_ROWS.up_to(256) == [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256]
    assert GPU_ROWS.up_to(1024)[14:] == [384, 512, 640, 768, 896, 1024]
