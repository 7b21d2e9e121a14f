"""The bootstrap: draws a run's requests again, to see what other runs might give (Efron, 1979)."""

import numpy as np

_INTERVAL = (0.025, 0.975)


def resampled(
    num_requests: int, *, num_resamples: int, seed: int, num_together: int = 1
) -> np.ndarray:
    """Return the requests of each resample: int [num_resamples, num_requests].

    Args:
        num_together: consecutive requests drawn at once, with the first after the last (Politis
            and Romano, 1992): neighbours wait for the same things, so each alone tells less.
    """
    rng = np.random.default_rng(seed)
    num_blocks = -(-num_requests // num_together)
    starts = rng.integers(num_requests, size=(num_resamples, num_blocks))
    picks = (starts[:, :, None] + np.arange(num_together)) % num_requests
    return picks.reshape(num_resamples, -1)[:, :num_requests]


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return the interval of 95 % of the resamples' values, float [N]."""
    low, high = np.quantile(values, _INTERVAL).tolist()
    return low, high
