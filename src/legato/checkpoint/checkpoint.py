"""A checkpoint of any format."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from legato.core.config import Quantization
from legato.core.errors import ConfigError
from legato.model.config_keys import KeyUse
from legato.model.model import NamedWeights
from legato.model.spec import DecoderSpec
from legato.model.transformers_spec import TransformersSpec


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model's description and weights; opened, but the weights are not read yet.

    Attributes:
        name: for messages.
        dtype: the dtype that "auto" selects.
        shapes: of the tensors that `tensors` yields, under the same names, from the files' headers.
        tensors: starts reading them for a model on a device. A tensor may still be on the CPU, have
            another dtype and share memory with the file. A GGUF file yields its weights quantized.
        is_quantized: whether matrices in the file are in codes that layers can compute with.
        architecture: its name in config.json.
        quantization: format of the quantized matrices, in the file's own words; empty if there are
            none.
        generates: whether it has an output projection.
        num_labels: outputs of its classification head; 0 without one.
        read_head: reads that head's weight [num_labels, E].
        kept_bytes: size of each tensor as layers keep it that compute with codes; key the tensor's
            name in the file, for a GGUF file transformers' name.
        unused: parts of the files that `tensors` leaves out, such as a vision model.
        keys: what becomes of the keys of its description; all empty where transformers reads them.
    """

    name: str
    spec: DecoderSpec | TransformersSpec
    dtype: torch.dtype
    shapes: Mapping[str, tuple[int, ...]]
    tensors: Callable[[torch.device], NamedWeights]
    is_quantized: bool = False
    architecture: str = ""
    quantization: str = ""
    generates: bool = True
    num_labels: int = 0
    read_head: Callable[[], torch.Tensor] | None = None
    kept_bytes: Mapping[str, int] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    keys: KeyUse = field(default_factory=KeyUse)

    def keeps_codes(self, quantization: Quantization | None) -> bool:
        """Whether weights stay as the file quantizes them, in layers that have such products."""
        return self.is_quantized and quantization in (None, "gguf")

    @property
    def decoder_spec(self) -> DecoderSpec:
        """The spec for Legato's own layers.

        Raises:
            ConfigError: transformers' layers run the model.
        """
        if isinstance(self.spec, TransformersSpec):
            raise ConfigError(
                f"transformers' layers run {self.name}, and this is for Legato's own layers alone"
            )
        return self.spec
