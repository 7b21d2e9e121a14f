"""What a batch's rows cost besides their number: padding, experts, and unpacking of weights."""

import msgspec


class ExpertCounts(msgspec.Struct, frozen=True, cache_hash=True, forbid_unknown_fields=True):
    """The layers with experts of a model.

    Attributes:
        num_active: experts that compute a row in a layer.
        num_layers: layers with experts.
    """

    num_experts: int
    num_active: int
    num_layers: int

    def touched(self, num_rows: int) -> float:
        """Return the expected experts, of all layers, that compute any of so many rows.

        As if all experts were as likely. Their weights are what a step of few rows reads.
        """
        idle: float = (1.0 - self.num_active / self.num_experts) ** num_rows
        return self.num_layers * self.num_experts * (1.0 - idle)


class RowCounts(
    msgspec.Struct, frozen=True, cache_hash=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Row counts that batches are padded to, experts, and when weights are unpacked.

    Attributes:
        stairs: pairs (bound, multiple), in order of bounds: up to `bound` rows, the row count is a
            multiple of `multiple`.
        multiple: beyond all bounds, the row count is a multiple of this.
        experts: None if no layer has experts.
        most_packed: most rows that are multiplied with packed weights; weights are unpacked for
            more rows. 0 if the number of rows makes no such difference.
    """

    stairs: tuple[tuple[int, int], ...]
    multiple: int
    experts: ExpertCounts | None = None
    most_packed: int = 0

    def padded(self, num_rows: int) -> int:
        """Return the row count, at least `num_rows`, that a batch is padded to."""
        for bound, multiple in self.stairs:
            if num_rows <= bound:
                return -(-num_rows // multiple) * multiple
        return -(-num_rows // self.multiple) * self.multiple

    def are_unpacked(self, num_rows: int) -> bool:
        """Whether weights are unpacked for so many rows, and would not be for fewer."""
        return 0 < self.most_packed < num_rows

    def full(self, num_rows: int) -> int:
        """Return the largest row count, at most `num_rows`, that needs no padding."""
        low = 0
        for bound, multiple in self.stairs:
            if num_rows < bound:
                return max(low, num_rows // multiple * multiple)
            low = bound
        return max(low, num_rows // self.multiple * self.multiple)

    def up_to(self, num_rows: int) -> list[int]:
        """Return every row count that batches of 1 to `num_rows` rows are padded to."""
        return sorted({self.padded(n) for n in range(1, num_rows + 1)})


CPU_ROWS = RowCounts(((16, 1), (256, 16), (1024, 32)), 64)
"""PyTorch's matrix kernels are compiled for each row count, which takes longer than running them,
and chunks under a time budget come in every length. So there are few row counts: all up to 16, and
about one in sixteen above. AMX multiplies tiles of 16 rows."""

UNPADDED = RowCounts((), 1)
"""Legato's kernels for AVX2 and AVX-512 divide any number of rows into blocks of about equal size.
(On AVX2, 17 rows of the default model take 0.61 of what 32 take.)"""

GPU_ROWS = RowCounts(((1, 1), (2, 2), (4, 4), (8, 8), (64, 16), (256, 32)), 128)
"""A graph is captured for each row count. Decodes are close to one of them in number. Beyond, tiles
of matrix products have 128 rows, so fewer rows would take as long."""
