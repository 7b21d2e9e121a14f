"""What joins the replicas of a simulated fleet, and what passes over it."""

import msgspec

from legato.core.errors import ConfigError


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A network that no two replicas share but at their own ends.

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


class Traffic:
    """What is on the way over a link: at each end, one message after the other."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._free_s: dict[tuple[str, str], float] = {}  # key (a replica, "in" or "out")

    def busy_s(self, num_bytes: float) -> float:
        """How long a message takes an end's time."""
        return num_bytes / self._link.bytes_per_s

    def send(self, source: str, target: str, num_bytes: float, now_s: float) -> float:
        """When a message has arrived that is sent now, or as soon as both ends are free."""
        ends = (source, "out"), (target, "in")
        begins_s = max(now_s, *(self._free_s.get(end, 0.0) for end in ends))
        ends_s = begins_s + self.busy_s(num_bytes)
        self._free_s.update(dict.fromkeys(ends, ends_s))
        return ends_s + self._link.latency_s
