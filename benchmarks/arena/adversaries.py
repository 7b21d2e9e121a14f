"""Floods by some tenants beside the light load of others, on four shapes and under promises."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from benchmarks.arena.case import Case, Shape, Source
from benchmarks.arena.shapes import prompt_of, shapes, stream_s
from legato.core.slo import BATCH

_LONG_S = 6.0
"""Time that a long prompt takes alone, on every shape."""
_TTFT_S = 10.0
_LIGHT_EVERY_S = 4.0
"""Time between two questions of all light tenants together."""
_SPREAD = 0.3

TENANTS = (2, 20)
PROMISES: dict[str, Callable[[float], dict[str, Any]]] = {
    "none": lambda step_s: {},  # noqa: ARG005
    "below": lambda step_s: {"itl_slo_s": 0.8 * step_s},
    "above": lambda step_s: {"itl_slo_s": 4.0 * step_s},
    "ttft": lambda step_s: {"itl_slo_s": 4.0 * step_s, "ttft_slo_s": _TTFT_S},
    "shed": lambda step_s: {
        "itl_slo_s": 4.0 * step_s,
        "ttft_slo_s": _TTFT_S,
        "shed_load": True,
    },
}
"""Key the name, value settings by the time of a step with one stream."""


def adversaries(seconds: float) -> Iterator[Case]:
    """Yield all cases, named SHAPE/FLOOD/TENANTS/PROMISE."""
    for shape, flood, num_tenants, promise in itertools.product(
        shapes().values(), FLOODS, TENANTS, PROMISES
    ):
        yield Case(
            name=f"{shape.name}/{flood}/{num_tenants}/{promise}",
            shape=shape,
            settings={
                "max_num_seqs": 32,
                "max_waiting": 128,
                **PROMISES[promise](stream_s(shape.costs)),
            },
            sources=[*_floods(shape, flood, num_tenants), *_light(num_tenants)],
            seconds=seconds,
        )


def _floods(shape: Shape, flood: str, num_tenants: int) -> Iterator[Source]:
    """Yield the flood's sources, its clients divided among the tenants that flood."""
    flooders = ["a"] if num_tenants == 2 else ["a", "b", "c", "d"]
    for source, tenant in itertools.product(FLOODS[flood](shape), flooders):
        num_clients = max(1, source.num_clients // len(flooders))
        name = f"{tenant}-{source.name}"
        yield msgspec.structs.replace(source, name=name, tenant=tenant, num_clients=num_clients)


def _light(num_tenants: int) -> Iterator[Source]:
    """Yield the sources of light tenants: a question now and then, and of one a stream."""
    light = ["z"] if num_tenants == 2 else [f"z{i}" for i in range(num_tenants - 4)]
    for place, tenant in enumerate(light):
        yield Source(
            name=f"{tenant}-question",
            num_prompt_tokens=100,
            num_output_tokens=20,
            spread=_SPREAD,
            tenant=tenant,
            every_s=_LIGHT_EVERY_S * len(light),
            start_s=3.0 + _LIGHT_EVERY_S * place,
            count=1000,
        )
    yield Source(
        name=f"{light[0]}-stream",
        num_prompt_tokens=200,
        num_output_tokens=2000,
        spread=_SPREAD,
        tenant=light[0],
        num_clients=1,
        start_s=5.0,
    )


def _streams(shape: Shape) -> list[Source]:  # noqa: ARG001
    return [_flood("streams", 100, 3000, 48)]


def _deep_streams(shape: Shape) -> list[Source]:
    return [_flood("deep", prompt_of(shape, _LONG_S / 3.0), 2000, 24)]


def _prompts(shape: Shape) -> list[Source]:
    return [_flood("prompts", prompt_of(shape, _LONG_S), 20, 16)]


def _shorts(shape: Shape) -> list[Source]:  # noqa: ARG001
    return [_flood("shorts", 40, 4, 96)]


def _best_effort(shape: Shape) -> list[Source]:
    return [
        _flood("be-streams", 100, 3000, 32, slo_class=BATCH),
        _flood("be-prompts", prompt_of(shape, _LONG_S), 20, 8, slo_class=BATCH),
    ]


def _mixture(shape: Shape) -> list[Source]:
    long = prompt_of(shape, _LONG_S)
    return [
        _flood("streams", 100, 3000, 12),
        _flood("prompts", long, 20, 4),
        _flood("shorts", 40, 4, 24),
        _flood("be-streams", 100, 3000, 8, slo_class=BATCH),
        _flood("be-prompts", long, 20, 4, slo_class=BATCH),
    ]


FLOODS: dict[str, Callable[[Shape], list[Source]]] = {
    "streams": _streams,
    "deep": _deep_streams,
    "prompts": _prompts,
    "shorts": _shorts,
    "batch": _best_effort,
    "mixture": _mixture,
}
"""Key the name, value the sources, of one tenant."""


def _flood(name: str, num_prompt: int, num_output: int, num_clients: int, **fields: Any) -> Source:
    return Source(
        name=name,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        spread=_SPREAD,
        num_clients=num_clients,
        **fields,
    )
