"""The Pareto front of candidates."""

from collections.abc import Sequence

from legato_lab.tune.search import Tried


def pareto_front(tried: Sequence[Tried]) -> list[Tried]:
    """Keep candidates unless another has at least their throughput at no longer ITL and TTFT.

    Throughput is that of a saturated server; latencies are the 99th percentiles under the workload.
    The highest throughput comes first; of equal candidates only the first is kept.
    """
    kept: list[Tried] = []
    for one in sorted(tried, key=_costs):
        if not any(_is_beaten(one, by) for by in kept):
            kept.append(one)
    return kept


def _costs(one: Tried) -> tuple[float, float, float]:
    figures = one.figures
    return -(figures.saturated_tokens_per_s or 0.0), figures.itl_p99_s, figures.ttft_p99_s


def _is_beaten(one: Tried, by: Tried) -> bool:
    return all(theirs <= ours for theirs, ours in zip(_costs(by), _costs(one), strict=True))
