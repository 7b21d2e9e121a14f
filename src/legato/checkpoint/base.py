"""A checkpoint of any format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from legato.model.base import NamedWeights
from legato.model.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model's description and weights; opened, but the weights are not read yet.

    Attributes:
        name: for messages.
        dtype: the dtype that "auto" selects.
        shapes: of the tensors that `tensors` yields, under the same names, from the files' headers.
        tensors: starts reading them for a model on a device. A tensor may still be on the CPU, have
            another dtype and share memory with the file. A GGUF file yields its weights quantized.
        is_quantized: whether the model computes with weights as they are quantized in the file,
            unless they are to be quantized in another way.
        unused: parts of the files that `tensors` leaves out, such as a vision model.
    """

    name: str
    spec: DecoderSpec
    dtype: torch.dtype
    shapes: Mapping[str, tuple[int, ...]]
    tensors: Callable[[torch.device], NamedWeights]
    is_quantized: bool = False
    unused: tuple[str, ...] = ()
