"""Ranges of settings, declared once for flags, keywords of `LLM` and PATCH /settings."""

from typing import Annotated

import msgspec

LEAST_S, MOST_S = 1e-6, 86_400.0
"""A microsecond and a day."""

Seconds = Annotated[float, msgspec.Meta(ge=LEAST_S, le=MOST_S)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Share = Annotated[float, msgspec.Meta(ge=0.001, le=1.0)]
Slack = Annotated[float, msgspec.Meta(ge=0.0)]
"""A fraction; infinity is unbounded."""
Size = Annotated[int, msgspec.Meta(ge=1, le=2**50)]
SizeOrZero = Annotated[int, msgspec.Meta(ge=0, le=2**50)]
