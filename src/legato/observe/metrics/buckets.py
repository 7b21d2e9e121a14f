"""Bounds of the histograms' buckets: vLLM's, finer where SLOs lie."""

from collections.abc import Iterable

Buckets = tuple[float, ...]

# fmt: off
PER_TOKEN_S: Buckets = (
    0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.125, 0.15,
    0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TTFT_S: Buckets = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5,
    2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
REQUEST_S: Buckets = (
    0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
STEP_S: Buckets = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.125, 0.15, 0.2,
    0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
STEP_TIME_RATIO: Buckets = (
    0.5, 0.7, 0.8, 0.85, 0.9, 0.94, 0.97, 1.0, 1.03, 1.06, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0, 4.0)
STEP_TOKENS: Buckets = (
    0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0,
    16384.0)
COMPLETIONS: Buckets = (1.0, 2.0, 5.0, 10.0, 20.0)
# fmt: on
TOKENS: Buckets = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


def with_bounds(buckets: Buckets, promises_s: Iterable[float | None]) -> Buckets:
    """The same with a bound at each promise, so that the share within it is exact.

    Args:
        promises_s: in seconds; None promises nothing.
    """
    return tuple(sorted({*buckets, *(s for s in promises_s if s is not None)}))
