"""Ranges of the numbers in a model's records; `DecoderSpec.check` compares them."""

from typing import Annotated

import msgspec

Size = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Scale = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Eps = Annotated[float, msgspec.Meta(ge=1e-12, le=0.1)]
