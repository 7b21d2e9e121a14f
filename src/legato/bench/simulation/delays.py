"""What passes outside of steps: between two of them, and on the way to and from clients."""

import msgspec

from legato.bench.workload.workload import WorkloadRequest
from legato.core.errors import ConfigError


class Delays(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds, each a constant and what a token adds to it.

    Attributes:
        turnaround_s, turnaround_token_s: from the end of a step to the next; a token is one that
            the former brought.
        intake_s, intake_token_s: from when a request is due to when the scheduler may see it; a
            token is one of its prompt.
        delivery_s, delivery_token_s: from the end of a step to a client; a token is one of the same
            step that is delivered before.
    """

    turnaround_s: float = 0.0
    turnaround_token_s: float = 0.0
    intake_s: float = 0.0
    intake_token_s: float = 0.0
    delivery_s: float = 0.0
    delivery_token_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) >= 0.0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")

    def turnaround(self, num_tokens: int) -> float:
        """After a step that brought so many."""
        return self.turnaround_s + num_tokens * self.turnaround_token_s

    def intake(self, request: WorkloadRequest) -> float:
        return self.intake_s + request.num_prompt_tokens * self.intake_token_s

    def delivery(self, num_before: int) -> float:
        """Of a token behind so many others of its step."""
        return self.delivery_s + num_before * self.delivery_token_s


NO_DELAYS = Delays()
