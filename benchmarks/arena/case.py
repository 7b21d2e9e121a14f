"""What is simulated: a machine, a server's settings, and clients that send alike requests."""

from typing import Any

import msgspec

from legato.core.slo import INTERACTIVE
from legato.core.tenant import DEFAULT_TENANT
from legato.scheduler.step_costs import StepCosts


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A model on a machine.

    Attributes:
        truth_error, noise: as in `Truth` of the simulated server.
        turnaround_s: time between two steps.
    """

    name: str
    costs: StepCosts
    max_model_len: int
    kv_cache_tokens: int
    truth_error: float = 0.1
    noise: float = 0.05
    turnaround_s: float = 0.5e-3


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Clients that send alike requests.

    Attributes:
        max_tokens: that a request asks for; None asks for `num_output_tokens`, after which the
            client leaves in any case.
        spread: largest relative deviation of a length from its mean.
        num_clients: clients that send the next request when theirs has ended; a refused one comes
            back after `Retry-After`, every second one impatiently. 0 for requests at given times.
        every_s, count: without clients, the time between two requests and their number.
        start_s: time of the first request.
    """

    name: str
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int | None = None
    spread: float = 0.0
    tenant: str = DEFAULT_TENANT
    slo_class: str = INTERACTIVE
    num_clients: int = 0
    every_s: float = 0.0
    count: int = 1
    start_s: float = 0.0


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """The machine stands still once.

    Attributes:
        at_s: earliest time.
        seconds: None lets the time pass until the token of the first stream is due.
        in_step: whether a step takes that much longer; else it passes between two steps.
    """

    at_s: float
    seconds: float | None
    in_step: bool = False


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated run.

    Attributes:
        settings: fields of `SchedulerConfig`; a version without a field leaves it out.
        seconds: simulated time, at most.
        until: name of the source with whose last request the run ends; empty for none.
        stale_s: how long ago a waiting best-effort request is said to have been passed first, once,
            after the first preemption: a wait too long to simulate. None changes nothing.
        issue: the issue's figures, in words.
        quote: the same figures of this run, as a format of `Outcome.by_source` and `run`.
    """

    name: str
    shape: Shape
    sources: list[Source]
    settings: dict[str, Any] = {}
    seconds: float = 60.0
    until: str = ""
    pauses: list[Pause] = []
    stale_s: float | None = None
    seed: int = 0
    issue: str = ""
    quote: str = ""
