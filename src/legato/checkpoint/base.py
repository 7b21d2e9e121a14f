"""A checkpoint, whatever its format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from legato.model.base import NamedWeights
from legato.model.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model's description and weights, opened but not read.

    Attributes:
        name: for messages.
        dtype: that "auto" stands for.
        shapes: of what `tensors` yields, under the same names and as the files' headers say.
        tensors: begins to read them, for a model on a device; a tensor may still be on the CPU, be
            of another dtype and share memory with the file. A GGUF file yields weights as they are
            quantized.
    """

    name: str
    spec: DecoderSpec
    dtype: torch.dtype
    shapes: Mapping[str, tuple[int, ...]]
    tensors: Callable[[torch.device], NamedWeights]
