"""Sampling parameters with one more field for drawing, as a new one would be."""

from typing import Any, NamedTuple

from legato.core.sampling_params import Filters, SamplingParams


class _WiderFilters(NamedTuple):
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 0.5


class _WiderDraw(NamedTuple):
    temperature: float = 1.0
    filters: Filters = Filters(1.0, 0, 0.0)
    seed: int | None = 0
    typical_p: float = 0.5


class _MoreOfDraw(SamplingParams, frozen=True):
    @property
    def draw(self) -> Any:
        return _WiderDraw()


class _MoreOfFilters(SamplingParams, frozen=True):
    @property
    def draw(self) -> Any:
        return super().draw._replace(filters=_WiderFilters())


WIDER = (_MoreOfDraw(seed=0), _MoreOfFilters(seed=0))
