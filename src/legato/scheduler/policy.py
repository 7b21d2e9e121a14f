"""Policies: the order in which a step is filled. All use the same parts."""

from collections.abc import Callable

from legato.core.config import Policy
from legato.scheduler.step_builder import StepBuilder


def stall_free(step: StepBuilder) -> None:
    """Running streams first, then prefill in the rest (Sarathi-Serve's stall-free batching)."""
    step.admission.make_way()
    step.add_decodes()
    step.add_prefills()
    step.add_best_effort()


def prefill_first(step: StepBuilder) -> None:
    """Prefill while there is any, decode otherwise, as mini-SGLang and nano-vLLM do.

    For comparison: running streams wait for every chunk.
    """
    step.admission.make_way()
    step.add_prefills()
    step.add_best_effort()
    if not step.chunks:
        step.add_decodes()


POLICIES: dict[Policy, Callable[[StepBuilder], None]] = {
    "stall-free": stall_free,
    "prefill-first": prefill_first,
}
