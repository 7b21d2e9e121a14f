"""The default model in each format in which models are published."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from benchmarks.formats.gguf_copy import TypeOf, copy_gguf, everything, medium_mix
from benchmarks.formats.gguf_writers import LARGE, SMALL
from benchmarks.formats.hub_copy import save_quantized
from benchmarks.formats.hub_writers import FORMATS
from legato.checkpoint.loader import load_model, open_checkpoint
from legato.checkpoint.source import resolve_source
from legato.core.config import DEFAULT_MODEL, ModelConfig, Quantization
from legato.model.native_kernels import NativeKernels, native_instructions

_MIXES: dict[str, TypeOf] = {
    **{kind: everything(kind) for kind in ("BF16", *SMALL, *LARGE)},
    "Q4_K_M": medium_mix,
}
NAMES = (*_MIXES, *FORMATS)


class Published(msgspec.Struct, frozen=True):
    """A checkpoint of the default model.

    Attributes:
        path: a GGUF file, or a folder.
        quantization: keeps its codes.
        reference: a checkpoint of the weights that the codes stand for, read as bfloat16.
    """

    name: str
    path: str
    quantization: Quantization | None
    reference: str


def published(names: list[str]) -> Iterator[Published]:
    """Write the checkpoints, one at a time; each is removed when the next is asked for."""
    source = resolve_source(DEFAULT_MODEL).path
    model: PreTrainedModel | None = None
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if name in _MIXES:
                path = folder / "model.gguf"
                copy_gguf(source, path, _MIXES[name])
                yield Published(name, str(path), "gguf", str(path))
                continue
            model = model or _dequantized(source)
            values = save_quantized(model, folder / "codes", FORMATS[name])
            plain = {key: value.bfloat16() for key, value in values.items()}
            model.save_pretrained(folder / "plain", state_dict=plain)
            yield Published(name, str(folder / "codes"), None, str(folder / "plain"))


def loading(one: Published, num_threads: int = 2) -> tuple[float, float]:
    """Return bits that a step reads a weight, and the seconds that loading takes."""
    config = ModelConfig(model=one.path, quantization=one.quantization)
    begin = time.perf_counter()
    checkpoint = open_checkpoint(config)
    model = load_model(
        checkpoint,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        kernels=NativeKernels(num_threads, native_instructions()[0]),
        quantization=one.quantization,
    )
    elapsed_s = time.perf_counter() - begin
    num_weights = sum(int(np.prod(shape)) for shape in checkpoint.shapes.values())
    return 8 * model.num_weight_bytes / num_weights, elapsed_s


def _dequantized(source: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
