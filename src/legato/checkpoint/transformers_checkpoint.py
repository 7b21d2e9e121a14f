"""Opens checkpoints for transformers' own layers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from legato.checkpoint.checkpoint import Checkpoint
from legato.checkpoint.quantization_config import method_of, schemes_of
from legato.checkpoint.transformers_tensors import TransformersTensors, in_order
from legato.checkpoint.weight_files import WeightFiles, dtype_named
from legato.core.validation import check_sizes, refusing_what_fails
from legato.model.architectures import text_config
from legato.model.transformers_paper import describe
from legato.model.transformers_spec import TransformersSpec
from legato.model.wrappers import TIED

_LAYERS = ("num_hidden_layers", "n_layer")
_SIZES = (
    *("vocab_size", "hidden_size", "n_embd", "intermediate_size", "n_inner", "head_dim"),
    *("num_attention_heads", "n_head", "num_key_value_heads", "num_local_experts", "num_experts"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "max_position_embeddings"),
    *("n_positions",),
)


def open_transformers_checkpoint(folder: Path, contents: Mapping[str, Any]) -> Checkpoint:
    """Open a folder whose model transformers' layers run.

    Args:
        contents: of its config.json.

    Raises:
        UnsupportedModelError: files are missing or broken, the weights are pickled, or the layers
            ask for what Legato does not have.
    """
    path = folder / "config.json"
    spec = read_spec(path, contents)
    with refusing_what_fails(path):
        schemes = schemes_of(dict(contents))
    files, named = WeightFiles(folder, schemes), TransformersTensors(spec)
    others = in_order(files.others)
    shapes = named.shapes_after(files.shapes)
    if spec.tie_word_embeddings and spec.head in shapes and spec.embedding in shapes:
        names = spec.embedding, spec.head
        if not files.has_copies(names, shapes[spec.head], named.shapes_after):
            spec = read_spec(path, {**contents, TIED: False})
            named = TransformersTensors(spec)
    return Checkpoint(
        name=str(folder),
        spec=spec,
        dtype=files.dtype(said_dtype(contents)),
        shapes=shapes,
        tensors=lambda _: named.converted(files.weights(others)),
        is_quantized=bool(schemes),
        architecture=text_config(dict(contents))["architectures"][0],
        quantization=method_of(dict(contents)),
        kept_bytes=files.kept_bytes,
    )


def read_spec(path: Path, contents: Mapping[str, Any]) -> TransformersSpec:
    """Return the spec of a model of a family in `FAMILIES`.

    Args:
        path: of the description, for messages.
        contents: of config.json.

    Raises:
        UnsupportedModelError: Legato cannot run the model.
    """
    layers = next((contents[name] for name in _LAYERS if name in contents), None)
    check_sizes(path, layers, **{name: contents.get(name) for name in _SIZES})
    with refusing_what_fails(path):
        return describe(contents)


def said_dtype(contents: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that config.json names; None if Legato does not compute in it."""
    return dtype_named(contents.get("dtype") or contents.get("torch_dtype"))
