"""How many rows a batch is computed with."""

from functools import cache

_EXACT = 16
_STEPS = ((256, 16), (1024, 32))
_COARSE = 64


@cache
def padded_rows(num_rows: int) -> int:
    """The number of rows, at least `num_rows`, that a batch is padded to.

    Matrix kernels are compiled for each number of rows they meet, which takes longer than running
    them, and chunks under a time budget come in every length. So there are few numbers: all up to
    16, and about one in sixteen of those above.
    """
    if num_rows <= _EXACT:
        return num_rows
    multiple = next((step for bound, step in _STEPS if num_rows <= bound), _COARSE)
    return -(-num_rows // multiple) * multiple


def row_counts(up_to: int) -> list[int]:
    """Every value of `padded_rows` for 1 to `up_to` rows."""
    return sorted({padded_rows(num_rows) for num_rows in range(1, up_to + 1)})
