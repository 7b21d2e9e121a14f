"""Fleets to simulate, in the user's notation: "4 both", or "2 prefill + 2 decode"."""

import re
from collections import Counter
from typing import get_args

import msgspec

from legato.core.errors import ConfigError
from legato_fleet.routing.request import Role
from legato_lab.simulation.link import SimulatedLink
from legato_lab.simulation.simulated_run import Simulable

_ROLES: tuple[Role, ...] = get_args(Role)
_PART = re.compile(r"\s*(\d+)\s+(\w+)\s*")
_MOST = 1024


class Split(msgspec.Struct, frozen=True, order=True):
    """The number of replicas in each role. Either all do both, or some do each."""

    both: int = 0
    prefill: int = 0
    decode: int = 0

    def __post_init__(self) -> None:
        if bool(self.prefill) != bool(self.decode):
            raise ConfigError(f"a fleet of {self} needs prefill and decode replicas, or neither")
        if self.both and self.prefill:
            raise ConfigError(f"a fleet of {self}: replicas do both, or are split, not a part each")
        if not 0 < len(self) <= _MOST:
            raise ConfigError(f"a fleet has 1 to {_MOST} replicas, got {len(self)}")

    def __len__(self) -> int:
        return self.both + self.prefill + self.decode

    def __str__(self) -> str:
        return " + ".join(f"{num} {role}" for role in _ROLES if (num := getattr(self, role)))

    @classmethod
    def parse(cls, text: str) -> "Split":
        """Raises ConfigError if the text has another form, or is no fleet."""
        found: Counter[str] = Counter()
        for part in text.split("+"):
            match = _PART.fullmatch(part)
            if match is None or match[2] not in _ROLES:
                raise ConfigError(
                    f"{text!r} is no fleet: write such as '4 both' or '2 prefill + 2 decode'"
                )
            found[match[2]] += int(match[1])
        return cls(**found)

    @property
    def roles(self) -> list[Role]:
        """The role of each replica."""
        return [role for role in _ROLES for _ in range(getattr(self, role))]


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that for a while takes requests, but neither computes nor reports.

    Attributes:
        place: of the replica in the fleet.
    """

    place: int = 0
    from_s: float
    until_s: float


class SimulatedFleet(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of one server, with a router and a link between them.

    Attributes:
        server: of each replica; replicas differ in their random numbers.
        routing: a key of `ROUTING_POLICIES`.
        kv_token_bytes: of a token's keys and values; None if no blocks are sent.
        state_every_s: seconds between two reports of a replica to the router.
        prefill: the server of replicas that only compute prompts; None means `server`.
        max_replicas: the most that are started when promises are in danger; None starts none.
        mtbf_s: mean time until a replica dies; None if none does.
        hang: of a replica; None if none hangs.
        start_s: time until a new replica serves.
        max_retries: how often clients send a refused request again, after the time that the
            refusal says.
        seed: for the times at which replicas die.
    """

    server: Simulable
    split: Split
    routing: str = "kept-promise"
    link: SimulatedLink = SimulatedLink()
    kv_token_bytes: float | None = None
    state_every_s: float = 1.0
    prefill: Simulable | None = None
    max_replicas: int | None = None
    mtbf_s: float | None = None
    hang: Hang | None = None
    start_s: float = 60.0
    max_retries: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.split.prefill and not self.kv_token_bytes:
            raise ConfigError(
                f"for a fleet of {self.split}, the profile must tell kv_token_bytes, which are "
                "what a token's keys and values take"
            )
        for name in ("state_every_s", "start_s", "mtbf_s"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0.0:
                raise ConfigError(f"{name} must be positive, got {seconds}")
        if self.max_retries < 0:
            raise ConfigError(f"max_retries must be at least 0, got {self.max_retries}")
        if self.max_replicas is not None:
            self._check_scaling(self.max_replicas)

    def _check_scaling(self, most: int) -> None:
        if self.split.prefill:
            raise ConfigError(f"how many replicas a fleet of {self.split} has is not changed")
        if not len(self.split) <= most <= _MOST:
            raise ConfigError(
                f"max_replicas must be {len(self.split)}, with which the fleet begins, to {_MOST}, "
                f"got {most}"
            )

    @property
    def max_model_len(self) -> int:
        return self.server.max_model_len

    def server_of(self, role: Role) -> Simulable:
        """Return the server of a role's replicas."""
        return self.prefill if role == "prefill" and self.prefill is not None else self.server
