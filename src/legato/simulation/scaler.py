"""How many replicas a simulated fleet is to have: Legato's rule, as Ray Serve applies it."""

from collections.abc import Sequence

from legato.routing.scaling import SLOWER_S, SOONER_S, wanted_replicas


class Scaler:
    """Wants more replicas, or fewer, once that has been right for a while. Time is an argument.

    Args:
        fewest, most: replicas that there may be.
    """

    def __init__(self, fewest: int, most: int) -> None:
        self._fewest, self._most = fewest, most
        self._direction = 0
        self._since_s = 0.0

    def wanted(self, strains: Sequence[float], now_s: float) -> int:
        """How many there should be. Args: strains: of each that there is."""
        current = len(strains)
        wanted = min(self._most, max(self._fewest, wanted_replicas(strains)))
        direction = (wanted > current) - (wanted < current)
        if direction != self._direction:
            self._direction, self._since_s = direction, now_s
        if now_s - self._since_s < (SOONER_S if direction > 0 else SLOWER_S):
            return current
        self._since_s = now_s
        return wanted
