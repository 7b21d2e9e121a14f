"""Percentiles of measured values."""

import msgspec
import numpy as np


class Distribution(msgspec.Struct, frozen=True):
    """Percentiles of values, interpolated linearly."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def distribution(values: np.ndarray) -> Distribution | None:
    """Return the distribution of values (any shape, any unit); None without values."""
    if values.size == 0:
        return None
    p50, p90, p95, p99, largest = np.percentile(values, [50, 90, 95, 99, 100]).tolist()
    return Distribution(float(values.mean()), p50, p90, p95, p99, largest)
