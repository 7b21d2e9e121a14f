"""Writes a model of transformers as a checkpoint with a quantization_config."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from benchmarks.formats.hub_writers import HubFormat

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save_quantized(
    model: PreTrainedModel, folder: Path, form: HubFormat
) -> dict[str, torch.Tensor]:
    """Save a model with its layers' matrices quantized; return all weights as they then are.

    Returns:
        Key the tensor's name, value float32: what the file stands for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, weight in model.state_dict().items():
        if name == _HEAD and model.config.tie_word_embeddings:
            continue
        wide = weight.float().contiguous()
        values[name] = wide
        if wide.ndim != 2 or name in (_EMBEDDING, _HEAD):
            tensors[name] = wide
            continue
        module = name.removesuffix(".weight")
        parts, values[name] = form.write(wide)
        tensors |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    config = model.config.to_dict() | {"quantization_config": form.config}
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config))
    return values
