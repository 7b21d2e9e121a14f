"""Synthetic workloads, for use without a trace.

Lengths are lognormal, as measured ones are: many short, few long.
"""

import math

import msgspec
import numpy as np

from legato_lab.simulation.workload import Workload, WorkloadRequest


class _Lengths(msgspec.Struct, frozen=True):
    """Lognormal token counts; `sigma` 0 makes all the same."""

    median: int
    sigma: float
    longest: int

    def draw(self, rng: np.random.Generator) -> int:
        length = round(rng.lognormal(math.log(self.median), self.sigma))
        return min(max(length, 1), self.longest)


class _Kind(msgspec.Struct, frozen=True):
    """One kind of request in a mix, with its share of the requests."""

    share: float
    prompt: _Lengths
    output: _Lengths
    slo_class: str | None = None


_CHAT = _Kind(1.0, _Lengths(300, 0.9, 4000), _Lengths(150, 0.7, 1000))
_CODE = _Kind(1.0, _Lengths(1500, 1.0, 8000), _Lengths(15, 0.8, 200))
_SUMMARIZE = _Kind(1.0, _Lengths(4000, 0.4, 8000), _Lengths(100, 0.5, 400))
_replace = msgspec.structs.replace

MIXES: dict[str, tuple[_Kind, ...]] = {
    "chat": (_CHAT,),
    "code": (_CODE,),
    "summarize": (_SUMMARIZE,),
    "mixed": (_replace(_CHAT, share=0.9), _replace(_SUMMARIZE, share=0.1)),
    "interactive+batch": (
        _replace(_CHAT, share=0.7, slo_class="interactive"),
        _replace(_SUMMARIZE, share=0.3, slo_class="batch"),
    ),
    "long-prompts-vs-short": (
        _Kind(0.1, _Lengths(7000, 0.0, 7000), _Lengths(16, 0.0, 16)),
        _Kind(0.9, _Lengths(64, 0.0, 64), _Lengths(128, 0.0, 128)),
    ),
}
"""Key the name for `--workload`."""


def draw_mix(name: str, num_requests: int, seed: int) -> Workload:
    """Draw requests of a mix, all arriving at once; one seed always gives the same.

    Args:
        name: a key of `MIXES`.
    """
    rng = np.random.default_rng(seed)
    kinds = MIXES[name]
    chosen = rng.choice(len(kinds), size=num_requests, p=[kind.share for kind in kinds])
    return [_draw(kinds[index], rng) for index in chosen]


def _draw(kind: _Kind, rng: np.random.Generator) -> WorkloadRequest:
    return WorkloadRequest(0.0, kind.prompt.draw(rng), kind.output.draw(rng), kind.slo_class)
