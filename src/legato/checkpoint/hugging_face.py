"""Opens checkpoints in transformers' format: config.json and safetensors files."""

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from legato.checkpoint.checkpoint import Checkpoint
from legato.checkpoint.json_file import read_json
from legato.checkpoint.quantization_config import is_quantized, method_of, schemes_of
from legato.checkpoint.scheme import Header, num_bytes
from legato.checkpoint.weight_files import WeightFiles, dtype_named
from legato.core.errors import UnsupportedModelError
from legato.core.validation import check_sizes, refusing_what_fails
from legato.model.architectures import (
    check_supported,
    described,
    generates,
    text_config,
    transforms,
)
from legato.model.config_keys import key_use
from legato.model.description import Description
from legato.model.spec import DecoderSpec
from legato.model.transforms import Transform, drop, prefix, rename, shapes_after, transformed
from legato.model.wrappers import TIED, media_prefixes

_HEAD, _BARE = "score.weight", "embed_tokens.weight"
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_MATRIX = 2  # dimensions
_TEXT_PARTS = {"language_model", "layers"}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)


def open_hf_checkpoint(folder: Path, served_len: int | None = None) -> Checkpoint:
    """Open a folder with config.json and one or more safetensors files.

    Matrices of a checkpoint with a `quantization_config` stay quantized.

    Args:
        served_len: positions that are served; None for all that the model was made for.

    Raises:
        UnsupportedModelError: files are missing or broken, the weights are pickled, or Legato
            cannot run the model.
    """
    description, spec, changes = read_description(folder, served_len)
    path = folder / "config.json"
    contents = read_config(folder)
    text = text_config(contents)
    with refusing_what_fails(path):
        schemes = schemes_of(text)
    files = WeightFiles(folder, schemes)
    changes = [*_own_transforms(files.headers), *changes]
    shapes = shapes_after(files.shapes, changes)
    spec, has_output = without_output(spec, contents, {*files.headers, *shapes})
    if spec.tie_word_embeddings and has_output and _OUTPUT in shapes:
        if _EMBEDDING not in shapes:
            changes.append(rename({_module(_OUTPUT): _module(_EMBEDDING)}))
            shapes[_EMBEDDING] = shapes.pop(_OUTPUT)
        elif not files.has_copies(
            (_EMBEDDING, _OUTPUT), shapes[_OUTPUT], lambda own: shapes_after(own, changes)
        ):
            spec = replace(spec, tie_word_embeddings=False)
    labels = num_labels(files.headers)
    return Checkpoint(
        name=str(folder),
        spec=spec,
        dtype=files.dtype(said_dtype(description)),
        shapes=shapes,
        tensors=lambda _: transformed(files.weights(files.others), changes),
        is_quantized=bool(schemes),
        architecture=text["architectures"][0],
        quantization=method_of(text),
        generates=has_output,
        num_labels=labels,
        read_head=(lambda: files.read(_HEAD)) if labels else None,
        kept_bytes=kept_bytes(files.headers, contents),
        unused=_unused(files.others, changes),
        keys=key_use(contents),
    )


def without_output(
    spec: DecoderSpec, contents: dict[str, Any], names: Container[str]
) -> tuple[DecoderSpec, bool]:
    """Return the spec for these tensors, and whether there is an output projection to generate by.

    A checkpoint for embeddings or classification has none. The embedding matrix then takes its
    place, so that layers load as always; no request samples from it. Where no key says whether the
    two are tied, they are if the file has one alone.

    Args:
        contents: of config.json.
        names: of the checkpoint's tensors, as in the file and after its transforms.
    """
    is_tied = spec.tie_word_embeddings
    if not is_tied and _OUTPUT not in names and _BARE not in names:
        is_tied = not {TIED, "tie_embedding"} & text_config(contents).keys()
    has_matrix = is_tied or _OUTPUT in names or _BARE not in names
    has_output = generates(contents) and has_matrix
    return replace(spec, tie_word_embeddings=is_tied or not has_output), has_output


def _module(weight: str) -> str:
    return weight.removesuffix(".weight")


def kept_bytes(headers: Mapping[str, Header], contents: dict[str, Any]) -> dict[str, int]:
    """Return the size of each tensor of the text model in its file; key the name.

    Args:
        contents: of config.json.
    """
    others = media_prefixes(contents)
    return {name: num_bytes(own) for name, own in headers.items() if not name.startswith(others)}


def num_labels(headers: Mapping[str, Header]) -> int:
    """Return the outputs of a checkpoint's classification head; 0 without one."""
    head = headers.get(_HEAD)
    return head.shape[0] if head is not None and len(head.shape) == _MATRIX else 0


def _own_transforms(names: Container[str]) -> list[Transform]:
    """Return the transforms that this checkpoint needs, before its architecture's.

    A decoder saved without a head lacks the prefix of its names. A classification head is read
    apart.
    """
    own = [drop(prefixes=(_HEAD,))] if _HEAD in names else []
    return [*own, prefix("model.", without=("lm_head.",))] if _BARE in names else own


def read_description(
    folder: Path, served_len: int | None = None
) -> tuple[Description, DecoderSpec, list[Transform]]:
    """Read a folder's config.json; return also how the checkpoint's tensors become weights.

    Args:
        served_len: positions that are served; None for all that the model was made for.

    Raises:
        UnsupportedModelError: the file is missing, or Legato cannot run the model.
    """
    path = folder / "config.json"
    contents = read_config(folder)
    with refusing_what_fails(path):
        text = text_config(contents)
        check_supported(text)
        sizes = {name: text.get(name) for name in _SIZES}
        check_sizes(path, text.get("num_hidden_layers"), **sizes)
        description, spec = described(text, served_len)
        return description, spec, transforms(contents, spec)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json; raises `UnsupportedModelError` if there are none.

    ModelOpt may describe its quantized matrices in a file of their own.
    """
    path = folder / "config.json"
    contents = read_json(path)
    if not contents:
        raise UnsupportedModelError(f"{folder} has no config.json")
    apart = read_json(folder / "hf_quant_config.json").get("quantization")
    with refusing_what_fails(path):
        if isinstance(apart, dict) and not is_quantized(text_config(contents)):
            contents["quantization_config"] = {"quant_method": "modelopt", **apart}
    return contents


def said_dtype(description: Description) -> torch.dtype | None:
    """Return the dtype that the configuration names; None if Legato does not compute in it."""
    return dtype_named(description.spelled("compute_dtype"))


def _unused(headers: Mapping[str, Header], changes: Sequence[Transform]) -> tuple[str, ...]:
    """Return the first parts of the names of tensors that are left out, but for "model".

    Of a layer, such as one that predicts further tokens, the number is named, too.
    Keys and values that the text model's layers have but do not compute are no part.
    """
    names = (
        name.removeprefix("model.")
        for name, header in headers.items()
        if name != _HEAD and not shapes_after({name: header.shape}, changes)
    )
    parts = (name.split(".") for name in names)
    found = {".".join(part[: 1 + (part[0] == "layers")]) for part in parts}
    return tuple(sorted(found - _TEXT_PARTS))
