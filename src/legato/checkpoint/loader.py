"""Opens a checkpoint and loads it into a model."""

import ctypes
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache
from typing import TypeVar

import torch

from legato.checkpoint.checkpoint import Checkpoint
from legato.checkpoint.described import weight_shapes
from legato.checkpoint.dummy import open_dummy_checkpoint
from legato.checkpoint.finite import check_finite
from legato.checkpoint.gguf import open_gguf_checkpoint
from legato.checkpoint.hugging_face import open_hf_checkpoint, read_config
from legato.checkpoint.source import configured_source
from legato.core.config import ModelConfig, Quantization
from legato.core.errors import ConfigError, UnsupportedModelError
from legato.model.communicator import ALONE, Communicator
from legato.model.decoder import Decoder
from legato.model.model import Model, NamedWeights
from legato.model.native_kernels import NativeKernels
from legato.model.native_model import NativeModel
from legato.model.packed_linear import PackedDecoder, can_pack
from legato.model.partly_native import PartlyNativeDecoder
from legato.model.quantization import QuantizedWeight, can_quantize, quantize, quantize_rotated
from legato.model.quantized_forms import can_multiply
from legato.model.sharding import shard
from legato.model.spec import LAYER_INPUTS_TABLE, DecoderSpec
from legato.model.transformers_families import runs_on_transformers
from legato.model.transformers_spec import TransformersSpec

logger = logging.getLogger(__name__)

AnyModel = TypeVar("AnyModel", bound=Model)

_MAX_NAMES = 5
_ROUTERS = (".mlp.gate.weight", ".mlp.shared_expert_gate.weight")
"""Ends of the names of small matrices, where an error would change which experts compute a row."""
_UNQUANTIZED = (*_ROUTERS, LAYER_INPUTS_TABLE)
"""No product reads the table, so its codes would only be widened."""
_HEAD = "lm_head.weight"
_VOCABULARY = ("model.embed_tokens.weight", _HEAD)
_BITS = {"int8": 8, "int4": 4, "w8a8": 8, "w4a8": 4}
_ROUNDING_ROWS = ("w8a8", "w4a8")


def open_checkpoint(config: ModelConfig) -> Checkpoint:
    """Find a model and read its description, but not its weights.

    Raises:
        ConfigError: there is no such model, or it is a GGUF file and transformers' layers are
            asked for.
        UnsupportedModelError: Legato cannot run it.
    """
    source = configured_source(config)
    if source.is_gguf and config.model_impl == "transformers":
        raise ConfigError(
            "a GGUF file runs on Legato's own layers, not on --model-impl transformers"
        )
    if config.load_format == "dummy":
        return open_dummy_checkpoint(config, source)
    if source.is_gguf:
        return open_gguf_checkpoint(source.path, config.max_model_len)
    if config.quantization == "gguf":
        raise ConfigError(f"quantization gguf needs a GGUF file, which {config.model} is not")
    contents = read_config(source.path)
    if runs_on_transformers(source.path, contents, config.model_impl):
        # Local import: transformers' layers take seconds to import.
        from legato.checkpoint.transformers_checkpoint import open_transformers_checkpoint

        return open_transformers_checkpoint(source.path, contents)
    return open_hf_checkpoint(source.path, config.max_model_len)


def resolve_dtype(config: ModelConfig, checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of weights and cache: the configured one, or for "auto" the checkpoint's."""
    if config.dtype == "auto":
        return checkpoint.dtype
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kernels: NativeKernels | None = None,
    quantization: Quantization | None = None,
    communicator: Communicator = ALONE,
) -> Model:
    """Build the model, or a rank's part of it, and load its weights one at a time.

    Args:
        kernels: of the native layers. With None, PyTorch's layers run, and compute with dequantized
            weights.
        communicator: to the other ranks; loading sends them nothing.

    Raises:
        ConfigError: the device cannot compute with weights quantized this way.
        UnsupportedModelError: tensors are missing, unexpected or of the wrong shape, or have values
            that are not finite.
    """
    check_quantization(quantization, device, has_kernels=kernels is not None)
    if kernels is None and device.type == "cpu" and checkpoint.keeps_codes(quantization):
        _log_widened(f"{checkpoint.name}: PyTorch's layers compute with widened weights")
        quantization = "none"
    with _one_thread() if kernels is not None else nullcontext():
        return fill_model(
            lambda: _empty_model(checkpoint.spec, dtype, device, kernels, communicator),
            checkpoint,
            dtype=dtype,
            device=device,
            quantization=quantization,
            communicator=communicator,
        )


def check_quantization(
    quantization: Quantization | None, device: torch.device, *, has_kernels: bool
) -> None:
    """Raise `ConfigError` if a device cannot compute with weights quantized this way.

    Args:
        has_kernels: whether native kernels compute a CPU's layers, or products of them.
    """
    if device.type != "cpu":
        if quantization in _ROUNDING_ROWS:
            raise ConfigError(
                f"quantization {quantization} is for CPUs; a GPU takes int8, int4 and fp8"
            )
    elif quantization == "fp8":
        raise ConfigError("quantization fp8 is for GPUs; a CPU takes int8, int4, w8a8 and w4a8")
    elif quantization in _ROUNDING_ROWS and not has_kernels:
        raise ConfigError(
            f"quantization {quantization} needs native kernels; PyTorch's layers take int8 and int4"
        )


def fill_model(
    make: Callable[[], AnyModel],
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None = None,
    communicator: Communicator = ALONE,
) -> AnyModel:
    """Check a checkpoint's shapes, then build a model and load its weights.

    Raises:
        ConfigError: w8a8 or w4a8 on a GPU.
        UnsupportedModelError: as `load_model`.
    """
    if device.type != "cpu":
        check_quantization(quantization, device, has_kernels=False)
    check_shapes(checkpoint)
    if checkpoint.unused and communicator.rank == 0:
        logger.info("%s: not used are %s", checkpoint.name, ", ".join(checkpoint.unused))
    if checkpoint.keys.unread and communicator.rank == 0:
        names = ", ".join(checkpoint.keys.unread)
        logger.warning(
            "%s: its description has keys that nothing reads: %s", checkpoint.name, names
        )
    model = make()
    model.load_weights(_read_weights(checkpoint, dtype, device, quantization, communicator))
    _give_back_memory()
    return model


def _give_back_memory() -> None:
    """Give back what was freed: glibc keeps codes that were unpacked while they were packed."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Limit PyTorch to one thread while native layers are packed in parallel.

    Its threads would wait for each other at every small tensor, and for the processor while the
    server's other processes start.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _empty_model(
    spec: DecoderSpec | TransformersSpec,
    dtype: torch.dtype,
    device: torch.device,
    kernels: NativeKernels | None,
    communicator: Communicator,
) -> Model:
    if isinstance(spec, TransformersSpec):
        # Local import: see `open_checkpoint`.
        from legato.model.transformers_model import transformers_model

        return transformers_model(spec, dtype=dtype, kernels=kernels)
    if kernels is not None:
        native = PartlyNativeDecoder if spec.states else NativeModel
        return native(spec, kernels, communicator)
    kind = PackedDecoder if can_pack(dtype, device) else Decoder
    return kind(spec, dtype=dtype, device=device, communicator=communicator)


def check_shapes(checkpoint: Checkpoint) -> None:
    """Compare the headers' shapes with the model's, before memory is taken for either.

    Raises:
        UnsupportedModelError: tensors are missing, unexpected or of the wrong shape.
    """
    spec = checkpoint.spec
    if isinstance(spec, DecoderSpec) and spec.num_experts > len(checkpoint.shapes):
        raise UnsupportedModelError(
            f"{checkpoint.name} has {len(checkpoint.shapes):,} tensors, fewer than the "
            f"{spec.num_experts:,} experts in {spec.num_layers:,} layers that it describes"
        )
    needed = weight_shapes(spec)
    for name, shape in checkpoint.shapes.items():
        if _is_redundant(name, checkpoint):
            continue
        if name not in needed:
            raise UnsupportedModelError(f"{checkpoint.name}: unexpected tensor {name}")
        if shape != needed[name]:
            raise UnsupportedModelError(
                f"{checkpoint.name}: {name} has shape {shape} instead of {needed[name]}"
            )
    missing = [name for name in needed if name not in checkpoint.shapes]
    if missing:
        raise UnsupportedModelError(f"{checkpoint.name} lacks {_some_of(missing)}")


def _read_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None,
    communicator: Communicator,
) -> NamedWeights:
    """Yield a rank's part of each weight."""
    for name, tensor in _with_progress(checkpoint, device, is_shown=communicator.rank == 0):
        if not _is_redundant(name, checkpoint):
            part = shard(name, tensor, checkpoint.spec, communicator)
            if device.type != "cpu" and isinstance(part, QuantizedWeight):
                part = part.split()
            weight = _as_wanted(checkpoint, name, part, quantization)
            check_finite(f"{checkpoint.name}: {name}", weight, dtype)
            yield name, weight


def _as_wanted(
    checkpoint: Checkpoint,
    name: str,
    tensor: torch.Tensor | QuantizedWeight,
    quantization: Quantization | None,
) -> torch.Tensor | QuantizedWeight:
    """Quantize a tensor as configured; embeddings, which suffer most, to at least 8 bits.

    Routers and the embeddings for each layer stay as they are.
    """
    if isinstance(tensor, QuantizedWeight):
        if quantization == "none":
            return replace(tensor, is_stored_only=True)
        if checkpoint.keeps_codes(quantization):
            if can_multiply(tensor):
                return tensor
            _log_widened(f"{checkpoint.name}: matrices in groups of {tensor.group} are widened")
        tensor = tensor.dequantize()
    if quantization not in _BITS or not can_quantize(tensor) or name.endswith(_UNQUANTIZED):
        return tensor
    spec = checkpoint.spec
    if isinstance(spec, TransformersSpec):
        if name not in (spec.embedding, spec.head, *spec.matrices):
            return tensor
        in_vocabulary = name in (spec.embedding, spec.head)
    else:
        in_vocabulary = name in _VOCABULARY
    if quantization == "w4a8" and not in_vocabulary:
        return replace(quantize(tensor, 4), rounds_rows=True)
    if quantization in _ROUNDING_ROWS and not (".mlp." in name and _has_experts(spec)):
        return quantize_rotated(tensor)
    return quantize(tensor, 8 if in_vocabulary else _BITS[quantization])


def _has_experts(spec: DecoderSpec | TransformersSpec) -> bool:
    """Whether layers have experts: their rows, and those of MLPs, stay bfloat16."""
    return isinstance(spec, DecoderSpec) and spec.expert_counts is not None


@cache
def _log_widened(message: str) -> None:
    logger.warning("%s", message)


def _is_redundant(name: str, checkpoint: Checkpoint) -> bool:
    """Whether no model needs the tensor: computed frequencies, or the copy of a tied weight."""
    spec = checkpoint.spec
    head = spec.head if isinstance(spec, TransformersSpec) else _HEAD
    return name.endswith("rotary_emb.inv_freq") or (name == head and spec.tie_word_embeddings)


def _some_of(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    hidden = len(names) - _MAX_NAMES
    return f"{shown} and {hidden} more tensors" if hidden > 0 else shown


def _with_progress(checkpoint: Checkpoint, device: torch.device, *, is_shown: bool) -> NamedWeights:
    """Return the tensors, with a progress bar on a terminal and a log line elsewhere."""
    tensors = checkpoint.tensors(device)
    if not is_shown:
        return tensors
    description = f"Loading {checkpoint.name}"
    if not sys.stderr.isatty():
        logger.info("%s (%d tensors)", description, len(checkpoint.shapes))
        return tensors
    from rich.console import Console  # imported only for a terminal
    from rich.progress import track

    return track(
        tensors,
        description,
        total=len(checkpoint.shapes),
        console=Console(stderr=True),
        transient=True,
    )
