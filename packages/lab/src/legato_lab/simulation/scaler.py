"""Sizes a simulated fleet by Legato's rule, as Ray Serve applies it."""

from collections.abc import Sequence

from legato_fleet.routing.scaling import SLOWER_S, SOONER_S, wanted_replicas


class Scaler:
    """Changes the number of replicas once the change has been due for a while. Time is an argument.

    Args:
        fewest, most: bounds of the number of replicas.
    """

    def __init__(self, fewest: int, most: int) -> None:
        self._fewest, self._most = fewest, most
        self._direction = 0
        self._since_s = 0.0

    def wanted(self, strains: Sequence[float], now_s: float) -> int:
        """Return the number of replicas to have. Args: strains: of each present replica."""
        current = len(strains)
        wanted = min(self._most, max(self._fewest, wanted_replicas(strains)))
        direction = (wanted > current) - (wanted < current)
        if direction != self._direction:
            self._direction, self._since_s = direction, now_s
        if now_s - self._since_s < (SOONER_S if direction > 0 else SLOWER_S):
            return current
        self._since_s = now_s
        return wanted
