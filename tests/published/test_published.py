"""Published checkpoints: a tiny one of each layout loads, or is refused for a reason.

`checkpoints.json` has the layouts, written from public facts: the class, the names of tensors, and
those keys of config.json that differ from transformers'. No weights are published ones.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.formats.hub_writers import FORMATS
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from legato.checkpoint.loader import check_shapes, open_checkpoint
from legato.core.config import ModelConfig
from legato.core.errors import UnsupportedModelError
from legato.model.wrappers import WRAPPERS
from tests.families.tiny import _BY_CLASS, MODELS
from tests.families.tiny_config import Tiny

Layout = dict[str, Any]
LAYOUTS: list[Layout] = json.loads(Path(__file__).with_name("checkpoints.json").read_text())
LOADED = [layout for layout in LAYOUTS if "model" in layout or "tiny" in layout]
REFUSED = [layout for layout in LAYOUTS if layout not in LOADED]
MIN_PUBLISHED, NUM_RECIPES, MIN_LOADED = 250, 146, 109


def name_of(layout: Layout) -> str:
    return str([*layout.get("recipes", ()), *layout.get("others", ())][0])


@cache
def shapes_of(tiny: str, settings: str) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return config.json and the shapes of the published names of a family's tensors."""
    base = MODELS.get(tiny, Tiny(tiny))
    own = Tiny(base.model_type, {**base.settings, **json.loads(settings)})
    by_class = _BY_CLASS.get(own.model_type)
    make = AutoModelForCausalLM.from_config if by_class is None else by_class._from_config
    with torch.device("meta"):
        model = make(own.config(), dtype=torch.float32)
    tensors = revert_weight_conversion(model, dict(model.state_dict()))
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    return config, {name: tuple(own.shape) for name, own in tensors.items() if name not in tied}


def write(layout: Layout, folder: Path) -> None:
    """Write a tiny random checkpoint of this layout."""
    model = layout.get("model") or layout["tiny"]
    config, shapes = shapes_of(model, json.dumps(layout.get("settings", {})))
    tensors = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    dropped = layout.get("drop", "^$")
    tensors = {name: own for name, own in tensors.items() if not re.search(dropped, name)}
    tensors |= _quantized(layout, tensors)
    if "format" in layout:
        tensors = {name: own for name, own in tensors.items() if not _is_quantized(layout, name)}
    if layout.get("stack"):
        tensors = _stacked(tensors, layout["stack"])
    tensors = {_renamed(name, layout): own for name, own in tensors.items()}
    tensors |= {name: torch.ones(shape) for name, shape in layout.get("add", {}).items()}
    tensors |= {f"{tower}.layers.0.weight": torch.ones(2, 2) for tower in layout.get("towers", ())}
    save_file(
        {name: own.contiguous() for name, own in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(_config(layout, config)))


def _is_quantized(layout: Layout, name: str) -> bool:
    """Whether a matrix is a linear layer's that the format holds."""
    is_linear = name.endswith("_proj.weight") or re.search(r"experts\.\d+\.w\d\.weight$", name)
    return bool(is_linear and re.search(layout.get("modules", ""), name))


def _quantized(layout: Layout, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of the matrices that the format holds, without the last word's dot."""
    if "format" not in layout:
        return {}
    return {
        f"{name.removesuffix('weight')}{suffix}" + ("\0" if suffix == "weight" else ""): part
        for name, own in tensors.items()
        if _is_quantized(layout, name)
        for suffix, part in _parts(layout, own).items()
    }


def _parts(layout: Layout, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a matrix's tensors in the format, with the suffixes of the layout."""
    parts, _ = FORMATS[layout["format"]].write(matrix.float())
    other = layout.get("suffixes", {})
    return {other.get(suffix, suffix): part for suffix, part in parts.items()}


def _stacked(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Stack experts, gates before ups: as inputs by outputs ("transposed"), or in FP8 ("fp8").

    gpt-oss's are stacked already, and become MXFP4 ("mxfp4").
    """
    if kind == "mxfp4":
        return {
            f"{name}{part}": own
            for name, tensor in tensors.items()
            for part, own in _mxfp4(name, tensor).items()
        }
    parts: dict[str, dict[str, list[torch.Tensor]]] = {}
    kept = {}
    for name, own in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)_proj\.weight", name)
        if match is None:
            kept[name] = own
        else:
            parts.setdefault(match[1], {}).setdefault(match[2], []).append(own)
    for parent, experts in parts.items():
        gates, ups, downs = (torch.stack(experts[part]) for part in ("gate", "up", "down"))
        both = {"gate_up_proj": torch.cat([gates, ups], 1), "down_proj": downs}
        for part, stack in both.items():
            name = f"{parent}.{part}"
            if kind == "transposed":
                kept[name] = stack.transpose(1, 2)
                continue
            kept[name] = stack.to(torch.float8_e4m3fn)
            kept[f"{name}_scale_inv"] = torch.rand(len(stack), 1, 1)
            kept[f"{name}_activation_scale"] = torch.rand(len(stack))
    return kept


def _mxfp4(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return {"": tensor}
    count, depth, num_outputs = tensor.shape
    shape = count, num_outputs, depth // 32
    return {
        "_blocks": torch.randint(0, 256, (*shape, 16), dtype=torch.uint8),
        "_scales": torch.randint(120, 128, shape, dtype=torch.uint8),
    }


def _renamed(name: str, layout: Layout) -> str:
    name = name.removesuffix("\0")
    if name.startswith("lm_head."):
        return name.replace("lm_head", str(layout.get("head", "lm_head")), 1)
    prefix: str | None = layout.get("prefix")
    if prefix is None:
        return name
    is_whole = not prefix.endswith("model.") or name.startswith("backbone.")
    return prefix + (name if is_whole and "text" not in prefix else name.partition(".")[2])


def _config(layout: Layout, config: dict[str, Any]) -> dict[str, Any]:
    text = config | layout.get("keys", {})
    text = {key: value for key, value in text.items() if value != "absent"}
    text["model_type"] = layout.get("type", text["model_type"])
    quantization: dict[str, Any] = {}
    if "format" in layout:
        quantization["quantization_config"] = FORMATS[layout["format"]].config
        if "suffixes" in layout:
            own = {"activation_scheme": "static", "weight_block_size": None}
            quantization["quantization_config"] = quantization["quantization_config"] | own
    if layout["class"] not in WRAPPERS or layout.get("part") == "":
        return {**text, **quantization, "architectures": [layout["class"]]}
    text.pop("architectures", None)
    whole = {"architectures": [layout["class"]], "model_type": "wrapper"}
    part = layout.get("part", "text_config")
    if layout.get("quantized_part"):
        return {**whole, part: text | quantization}
    return {**whole, part: text, **quantization}


@pytest.mark.parametrize("layout", LOADED, ids=name_of)
def test_a_layout_loads(layout: Layout, tmp_path: Path) -> None:
    write(layout, tmp_path)
    checkpoint = open_checkpoint(ModelConfig(model=str(tmp_path)))
    check_shapes(checkpoint)
    assert {name for name, _ in checkpoint.tensors(torch.device("cpu"))} == set(checkpoint.shapes)
    towers = {tower.removeprefix("model.") for tower in layout.get("towers", ())}
    assert towers <= set(checkpoint.unused)
    assert bool(checkpoint.quantization) == ("format" in layout or layout.get("stack") == "mxfp4")


@pytest.mark.parametrize("layout", REFUSED, ids=name_of)
def test_another_is_refused_for_a_reason(layout: Layout, tmp_path: Path) -> None:
    contents = {"architectures": [layout["class"]], "model_type": layout["type"]}
    (tmp_path / "config.json").write_text(json.dumps(contents))
    with pytest.raises(UnsupportedModelError) as refusal:
        open_checkpoint(ModelConfig(model=str(tmp_path)))
    assert layout["class"] in str(refusal.value)
    assert "on no list" not in str(refusal.value)


def test_how_many_load() -> None:
    names = [
        n for layout in LAYOUTS for kind in ("recipes", "others") for n in layout.get(kind, ())
    ]
    assert len(names) == len(set(names)) >= MIN_PUBLISHED
    assert sum(len(layout.get("recipes", ())) for layout in LAYOUTS) == NUM_RECIPES
    assert sum(len(layout.get("recipes", ())) for layout in LOADED) >= MIN_LOADED


def test_the_table_has_every_wrapper() -> None:
    assert WRAPPERS.keys() - {layout["class"] for layout in LOADED} <= {
        *("Kimi_K25ForConditionalGeneration", "LlavaNextForConditionalGeneration"),
    }
