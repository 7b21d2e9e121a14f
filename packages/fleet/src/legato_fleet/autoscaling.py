"""The number of replicas, which Ray Serve asks for every few seconds.

If prefill and decode are separate, each pool is sized by its own strain.
"""

from typing import TYPE_CHECKING, Any

from legato_fleet.routing.scaling import strain, wanted_replicas

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

__all__ = ["STRAIN", "keep_promises", "strain", "wanted_replicas"]

STRAIN = "strain"
"""The name of a replica's metric."""


def keep_promises(context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
    """Ray Serve's autoscaling policy: as many replicas as the promises need."""
    told = (context.aggregated_metrics or {}).get(STRAIN, {})
    if len(told) < context.current_num_replicas:
        return context.target_num_replicas, {}  # new replicas have reported nothing yet
    fewest, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(most, max(fewest, wanted_replicas(list(told.values())))), {}
