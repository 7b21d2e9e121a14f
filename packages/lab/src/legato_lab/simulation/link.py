"""The link between the replicas of a simulated fleet, and its traffic."""

import msgspec

from legato.core.errors import ConfigError


class SimulatedLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A network in which replicas only share their own ends.

    Attributes:
        bytes_per_s: in and out of each replica.
        latency_s: from one replica to another.
    """

    bytes_per_s: float = 50e9
    latency_s: float = 1e-3

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0.0:
            raise ConfigError(f"a link's bandwidth must be positive, got {self.bytes_per_s}")
        if not self.latency_s >= 0.0:
            raise ConfigError(f"a link's latency must be at least 0, got {self.latency_s}")


class LinkTraffic:
    """Messages over a link; each end sends or receives one at a time."""

    def __init__(self, link: SimulatedLink) -> None:
        self._link = link
        self._free_s: dict[tuple[str, str], float] = {}  # key: (replica, "in" or "out")

    def busy_s(self, num_bytes: float) -> float:
        """Return how long a message occupies each end."""
        return num_bytes / self._link.bytes_per_s

    def send(self, source: str, target: str, num_bytes: float, now_s: float) -> float:
        """Send a message as soon as both ends are free; return when it arrives."""
        ends = (source, "out"), (target, "in")
        begins_s = max(now_s, *(self._free_s.get(end, 0.0) for end in ends))
        ends_s = begins_s + self.busy_s(num_bytes)
        self._free_s.update(dict.fromkeys(ends, ends_s))
        return ends_s + self._link.latency_s
