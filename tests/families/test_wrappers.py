"""Classes with images: the text model computes the logits of transformers' whole class."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from tests.families.layouts import PROMPT, logits_of
from tests.families.tiny import MODELS, randomize
from tests.model.conftest import assert_same_logits

TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 128,
    "patch_size": 14,
    "image_size": 28,
}
MULTI_AXIS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}


class Wrapped(NamedTuple):
    """Attributes: model: of the text, in `MODELS`; keys: that its description has besides."""

    model_type: str
    model: str
    text_type: str
    keys: dict[str, Any] = {}  # noqa: RUF012
    tower: dict[str, Any] = {}  # noqa: RUF012

    def config(self) -> Any:
        text = MODELS[self.model].config().to_dict() | self.keys | {"model_type": self.text_type}
        for name in ("architectures", "transformers_version", "dtype"):
            text.pop(name, None)
        own = {"text_config": text, "vision_config": TOWER | self.tower}
        return AutoConfig.for_model(self.model_type, **own)


_AXES = {"rope_parameters": MULTI_AXIS | {"mrope_section": [8, 12, 12]}}
_PARTIAL = {"rope_parameters": MULTI_AXIS | {"partial_rotary_factor": 0.5}}
WRAPPED = {
    "qwen2.5-vl": Wrapped(
        "qwen2_5_vl", "qwen2", "qwen2_5_vl_text", {"rope_parameters": MULTI_AXIS}
    ),
    "qwen2-vl": Wrapped("qwen2_vl", "qwen2", "qwen2_vl_text", {"rope_parameters": MULTI_AXIS}),
    "qwen3-vl": Wrapped("qwen3_vl", "qwen3", "qwen3_vl_text", _AXES),
    "qwen3-vl-moe": Wrapped(
        "qwen3_vl_moe", "qwen3-moe", "qwen3_vl_moe_text", _AXES | {"moe_intermediate_size": 48}
    ),
    "glm4v": Wrapped(
        "glm4v",
        "glm4",
        "glm4v_text",
        {
            "head_dim": 32,
            "rope_parameters": _PARTIAL["rope_parameters"] | {"mrope_section": [2, 3, 3]},
        },
    ),
    "glm4v-moe": Wrapped(
        "glm4v_moe", "glm4-moe", "glm4v_moe_text", _PARTIAL | {"use_qk_norm": False}
    ),
    "glm-ocr": Wrapped("glm_ocr", "glm4", "glm_ocr_text", _AXES | {"attention_bias": False}),
    "paddleocr-vl": Wrapped(
        "paddleocr_vl", "ernie4.5", "paddleocr_vl_text", _AXES | {"use_bias": False}
    ),
    "hunyuan-vl": Wrapped(
        "hunyuan_vl",
        "hunyuan",
        "hunyuan_vl_text",
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "factor": 1.0,
                "alpha": 1000.0,
                "mrope_section": [8, 8, 8, 8],
            }
        },
    ),
    "internvl": Wrapped("internvl", "qwen3", "qwen3"),
    "lfm2-vl": Wrapped("lfm2_vl", "lfm2", "lfm2"),
    "mistral3": Wrapped("mistral3", "ministral3", "ministral3"),
    "minicpm-v-4.6": Wrapped("minicpmv4_6", "qwen3.5", "qwen3_5_text"),
    "smolvlm": Wrapped("smolvlm", "llama", "llama"),
    "gemma3": Wrapped("gemma3", "gemma3", "gemma3_text"),
}


def random_wrapper(wrapped: Wrapped) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(wrapped.config(), dtype=torch.float32).eval()
    return randomize(model, wrapped.text_type)


@pytest.mark.parametrize("name", WRAPPED)
def test_text_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model = random_wrapper(WRAPPED[name])
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([PROMPT])).logits[0]
    assert_same_logits(logits_of(tmp_path), expected)
