"""Policies: the order in which a step is filled. All use the same parts."""

from collections.abc import Callable

from legato.core.config import Policy
from legato.scheduler.decodes import Decodes
from legato.scheduler.prefills import Prefills
from legato.scheduler.step import Step


def stall_free(decodes: Decodes, prefills: Prefills) -> Step:
    """Running streams first, then prefill in the rest (Sarathi-Serve's stall-free batching)."""
    step = decodes.begin()
    prefills.add(step)
    decodes.add_yielding(step)
    return step


def prefill_first(decodes: Decodes, prefills: Prefills) -> Step:
    """Prefill while there is any, decode otherwise, as mini-SGLang and nano-vLLM do.

    For comparison: running streams wait for every chunk.
    """
    step = decodes.begin_without()
    prefills.add(step)
    return step if step.chunks else decodes.begin()


POLICIES: dict[Policy, Callable[[Decodes, Prefills], Step]] = {
    "stall-free": stall_free,
    "prefill-first": prefill_first,
}
