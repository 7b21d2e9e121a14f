"""Opening a checkpoint and loading it into a decoder."""

import logging
import sys
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.progress import track

from legato.core.config import ModelConfig
from legato.core.errors import UnsupportedModelError
from legato.model.checkpoint import Checkpoint, NamedTensors
from legato.model.checkpoint_gguf import open_gguf_checkpoint
from legato.model.checkpoint_hf import open_hf_checkpoint
from legato.model.decoder import Decoder
from legato.model.native import Machine, make_native
from legato.model.packed_linear import can_pack, pack_linears
from legato.model.source import resolve_source

logger = logging.getLogger(__name__)

_MAX_NAMES = 5


def open_checkpoint(config: ModelConfig) -> Checkpoint:
    """Find a model and read its description, not yet its weights.

    Raises:
        ConfigError: there is no such model.
        UnsupportedModelError: Legato cannot run it.
    """
    source = resolve_source(config.model, config.revision)
    return open_gguf_checkpoint(source.path) if source.is_gguf else open_hf_checkpoint(source.path)


def resolve_dtype(config: ModelConfig, checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of weights and cache: the configured one, or the checkpoint's for "auto"."""
    if config.dtype == "auto":
        return checkpoint.dtype
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def load_decoder(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    machine: Machine | None = None,
) -> Decoder:
    """Build the decoder, copy the weights in one tensor at a time, and pack them for the CPU.

    Args:
        machine: what native layers run on; None takes PyTorch's.

    Raises:
        UnsupportedModelError: tensors are missing, unexpected or of the wrong shape.
    """
    decoder = Decoder(checkpoint.spec, dtype=dtype, device=device)
    slots = decoder.checkpoint_slots()
    for name, tensor in _with_progress(checkpoint):
        if _is_redundant(name, checkpoint):
            continue
        slot = slots.pop(name, None)
        if slot is None:
            raise UnsupportedModelError(f"{checkpoint.name}: unexpected tensor {name}")
        if slot.shape != tensor.shape:
            raise UnsupportedModelError(
                f"{checkpoint.name}: {name} has shape {tuple(tensor.shape)} instead of "
                f"{tuple(slot.shape)}"
            )
        slot.copy_(tensor)
    if slots:
        raise UnsupportedModelError(f"{checkpoint.name} lacks {_some_of(list(slots))}")
    if machine is not None:
        make_native(decoder, machine)
    elif can_pack(decoder):
        pack_linears(decoder)
    return decoder


def _is_redundant(name: str, checkpoint: Checkpoint) -> bool:
    """Old checkpoints hold computed frequencies, some hold tied weights twice."""
    return name.endswith("rotary_emb.inv_freq") or (
        name == "lm_head.weight" and checkpoint.spec.tie_word_embeddings
    )


def _some_of(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    hidden = len(names) - _MAX_NAMES
    return f"{shown} and {hidden} more tensors" if hidden > 0 else shown


def _with_progress(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, with a bar on a terminal and a line in the log elsewhere."""
    tensors: NamedTensors = checkpoint.tensors()
    description = f"Loading {checkpoint.name}"
    if not sys.stderr.isatty():
        logger.info("%s (%d tensors)", description, checkpoint.num_tensors)
        return tensors
    return iter(
        track(
            tensors,
            description,
            total=checkpoint.num_tensors,
            console=Console(stderr=True),
            transient=True,
        )
    )
