"""Deadlines inside a step: drops the last rows of prompts where the step would end late.

A batch's last rows are those of prompts, and attention is causal: no other row reads theirs. So a
step can drop them between two layers. The other rows are computed as if they had not been there.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import median_low

import msgspec

from legato.core.plan import ChunkResult, RowCut, StepPlan, StepResult
from legato.core.rows import RowCounts
from legato.executor.attention.attention_backend import AttentionBackend
from legato.executor.batch import PackedBatch
from legato.model.model import FirstRows

LAYERS_A_LOOK = 5
"""Layers from one look at the clock to the next. A look costs a call of the native layers."""
_FEWEST_LAYERS = 10
"""Layers after which a step's pace is known. After three, noise gave false alarms."""
MIN_LAYERS = 16
"""Layers of a model whose steps are watched. With fewer, hardly one look could drop any rows."""
_LEAST_PREFILL = 16
"""Rows of prompts that no step drops, so that prompts advance."""


class DeadlineWatch:
    """Watches the layers of one step, and drops as many rows as its deadline asks for.

    The pace is the median over the groups of layers between looks, so that an interruption, which
    hits one group, does not pass for a slow machine. How much faster a layer is without some rows
    follows from the plan.

    A step that would be late even with the fewest rows drops none: its streams would wait anyway.

    Args:
        plan: it has a deadline.
        batch: its rows.
        attention: makes the view of fewer rows.
        row_counts: the model's `rows`.
        begun_s: when the step was submitted, by `clock`.

    Attributes:
        batch, num_rows: the rows that the layers compute at present, padding excluded.
        cuts, foreseen_s: as in `StepResult`.
    """

    def __init__(
        self,
        plan: StepPlan,
        batch: PackedBatch,
        attention: AttentionBackend,
        row_counts: RowCounts,
        clock: Callable[[], float],
        begun_s: float,
    ) -> None:
        assert plan.deadline is not None
        self._deadline = plan.deadline
        self.batch = batch
        self._attention = attention
        self._row_counts = row_counts
        self._clock = clock
        self._begun_s = self._looked_s = begun_s
        self._num_layers = self._num_looked = 0
        self._paces_s: list[float] = []  # seconds of a layer with all rows, of each group
        self._num_all = self.num_rows = plan.num_tokens
        self._num_prefill = sum(
            chunk.num_tokens for chunk in plan.chunks if chunk.kind == "prefill"
        )
        self._least = _least_rows(plan, row_counts)
        self.cuts: list[RowCut] = []
        self.foreseen_s: float | None = None

    def looks(self, num_layers: int) -> Sequence[int]:
        """See `LayerWatch`."""
        self._num_layers = num_layers
        self._looked_s = self._clock()
        return range(LAYERS_A_LOOK, num_layers, LAYERS_A_LOOK)

    def look(self, num_done: int) -> FirstRows | None:
        """See `LayerWatch`."""
        now_s = self._clock()
        pace_s = (now_s - self._looked_s) / (num_done - self._num_looked)
        self._paces_s.append(pace_s / self._cost(self.num_rows))
        self._looked_s, self._num_looked = now_s, num_done
        if num_done < _FEWEST_LAYERS:
            return None
        rest_s = (self._num_layers - num_done) * median_low(self._paces_s)
        num_rows = self._kept(now_s - self._begun_s, rest_s)
        self.foreseen_s = now_s - self._begun_s + rest_s * self._cost(num_rows)
        if num_rows == self.num_rows:
            return None
        self.num_rows, self.batch = num_rows, self.batch.first_rows(num_rows)
        self.cuts.append(RowCut(num_done / self._num_layers, num_rows))
        attention = self._attention.begin_step(self.batch)
        self._looked_s = self._clock()
        return FirstRows(num_rows, attention)

    def _cost(self, num_rows: int) -> float:
        """Return the duration of a layer with the first rows as a share of one with all rows."""
        dropped = (self._num_all - num_rows) / self._num_prefill
        return 1.0 - self._deadline.prefill_share * dropped

    def _kept(self, elapsed_s: float, rest_s: float) -> int:
        """Return how many rows the other layers compute; they would take `rest_s` with all rows."""
        left_s = self._deadline.layers_s - elapsed_s
        excess_s = rest_s * self._cost(self.num_rows) - left_s
        row_s = rest_s * self._deadline.prefill_share / self._num_prefill
        if excess_s <= 0.0 or row_s <= 0.0 or self.num_rows <= self._least:
            return self.num_rows
        if elapsed_s + rest_s * self._cost(self._least) > self._deadline.late_s:
            return self.num_rows
        fitting = max(0.0, self.num_rows - excess_s / row_s)
        return max(self._row_counts.full(int(fitting)), self._least)


def with_dropped(result: StepResult, plan: StepPlan, watch: DeadlineWatch) -> StepResult:
    """Return the result of a step whose chunks lost rows, as of the plan that has them all."""
    chunks = dict(result.chunks)
    ends = accumulate(chunk.num_tokens for chunk in plan.chunks)
    for chunk, end in zip(plan.chunks, ends, strict=True):
        num_dropped = min(end - watch.num_rows, chunk.num_tokens)
        if num_dropped > 0 and chunk.request_id not in result.faults:
            found = chunks.get(chunk.request_id, ChunkResult(0))
            chunks[chunk.request_id] = msgspec.structs.replace(found, num_dropped=num_dropped)
    return msgspec.structs.replace(
        result, chunks=chunks, cuts=tuple(watch.cuts), foreseen_s=watch.foreseen_s
    )


def _least_rows(plan: StepPlan, row_counts: RowCounts) -> int:
    """Return the fewest rows of a step's first rows, which need no padding; or all of them."""
    num_kept, num_rows = 0, plan.num_tokens
    for chunk in plan.chunks:
        if chunk.kind == "prefill":
            num_kept += min(_LEAST_PREFILL, chunk.num_tokens)
            break
        num_kept += chunk.num_tokens
    return min(row_counts.padded(num_kept), num_rows)
