"""In which order a step is filled. Each policy is an order over the same parts."""

from collections.abc import Callable
from typing import Protocol

from legato.core.config import Policy


class Step(Protocol):
    """The parts that a policy orders."""

    @property
    def chunks(self) -> list: ...  # type: ignore[type-arg]

    def make_way(self) -> None: ...

    def add_decodes(self) -> None: ...

    def add_prefills(self) -> None: ...

    def add_best_effort(self) -> None: ...


def stall_free(step: Step) -> None:
    """Running streams first, prefill in what is left (Sarathi-Serve's stall-free batching)."""
    step.make_way()
    step.add_decodes()
    step.add_prefills()
    step.add_best_effort()


def prefill_first(step: Step) -> None:
    """Prefill while there is any, decode otherwise, as mini-SGLang and nano-vLLM do.

    For comparison: running streams wait for every chunk.
    """
    step.make_way()
    step.add_prefills()
    step.add_best_effort()
    if not step.chunks:
        step.add_decodes()


POLICIES: dict[Policy, Callable[[Step], None]] = {
    "stall-free": stall_free,
    "prefill-first": prefill_first,
}
