"""Sums of hidden states, over any chunks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from legato.core.plan import ScheduledChunk
from legato.executor.pooling import PooledPrompt


@given(
    hidden=st.integers(1, 30).map(lambda n: np.random.default_rng(n).normal(size=(n, 3))),
    is_mean=st.booleans(),
    data=st.data(),
)
def test_a_vector_does_not_depend_on_chunks_or_preemptions(
    hidden: np.ndarray, is_mean: bool, data: st.DataObject
) -> None:
    count = len(hidden)
    pooled = PooledPrompt("mean" if is_mean else "last", count)
    start, seen = 0, 0
    while start < count:
        assert pooled.vector is None
        end = data.draw(st.integers(start + 1, count))
        chunk = ScheduledChunk("a", start, end - start, (), 0, "prefill")
        if positions := pooled.positions(chunk):
            rows = hidden[positions.start : positions.stop]
            assert not is_mean or positions.start >= seen
            pooled.add(chunk, rows.sum(0))
        seen = max(seen, end)
        is_preempted = end < count and data.draw(st.booleans())
        start = data.draw(st.integers(0, end)) if is_preempted else end
    expected = hidden.mean(0) if is_mean else hidden[-1]
    assert pooled.vector is not None
    np.testing.assert_allclose(np.frombuffer(pooled.vector, np.float32), expected, rtol=1e-5)
