"""How many replicas there are to be: what Ray Serve asks every few seconds.

Where prefill and decode are apart, each pool is as large as its own strain asks for.
"""

from typing import TYPE_CHECKING, Any

from legato.routing.scaling import strain, wanted_replicas

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

__all__ = ["STRAIN", "keep_promises", "strain", "wanted_replicas"]

STRAIN = "strain"
"""What a replica's metric is called."""


def keep_promises(context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
    """A policy of Ray Serve's: as many replicas as keep what they promise."""
    told = (context.aggregated_metrics or {}).get(STRAIN, {})
    if len(told) < context.current_num_replicas:
        return context.target_num_replicas, {}  # those that are new have told nothing yet
    fewest, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(most, max(fewest, wanted_replicas(list(told.values())))), {}
